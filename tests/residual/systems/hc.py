"""Hyper-Connections, arXiv 2409.19606, sections 2 and 3: h0 = A_mᵀ R, x = norm(h0), R' = A_rᵀ R + Bᵀ y."""

import numpy as np

from tests.residual import starts
from tests.residual.statements import copies, end_of_sum, norm, normalise

CASES = [
    {},
    {"tanh": False},
    {"dynamic": False},
    {"streams": 1},
    {"streams": 2},
    {"gated_norm": 3},
    {"mix": "frozen"},  # Identity-HC
    {"read": "frozen", "mix": "frozen"},
    {"read": "frozen"},
    {"write": "frozen"},
    {"write": "frozen", "dynamic": False},
    {"read": "frozen", "dynamic": False},
]
start = starts.prenorm


def site(p, stream, y, *, k, eps, streams, dynamic=True, tanh=True, read="learned", mix="learned", write="learned"):
    """The dynamic parts are from the streams, each normed by itself; a frozen map is its start, without one."""
    squash = np.tanh if tanh else lambda v: v
    a_m = p["a_m"] if read == "learned" else np.eye(streams)[k % streams]
    a_r = p["a_r"] if mix == "learned" else np.eye(streams)
    b = p["b"] if write == "learned" else np.ones(streams)
    if dynamic:
        normed = normalise(stream, eps) * (1 + p["dyn_gain"])
        if write == "learned":
            b = b + p["s_beta"] * squash(np.einsum("btnd,d->btn", normed, p["w_beta"]))
        if read == "learned":
            a_m = a_m + p["s_alpha"] * squash(np.einsum("btnd,d->btn", normed, p["w_m"]))
        if mix == "learned":
            a_r = a_r + p["s_alpha"] * squash(np.einsum("btnd,dk->btnk", normed, p["w_r"]))
    batch = stream.shape[:2]
    a_m, b = (np.broadcast_to(v, (*batch, *v.shape[-1:])) for v in (a_m, b))
    a_r = np.broadcast_to(a_r, (*batch, *a_r.shape[-2:]))
    h0 = np.einsum("btn,btnd->btd", a_m, stream)
    width = np.einsum("btik,btid->btkd", a_r, stream)  # transposed: the sum is over A_r's first index
    depth = np.einsum("btk,btd->btkd", b, y)
    return norm(p, h0, eps), width + depth


def collapse(p, stream, *, eps, **switches):
    return end_of_sum(p, stream, eps)


def expand(x, *, streams, **switches):
    return copies(x, streams)
