"""Gated Residuals, Report eq. 30-35 (arXiv 2608.30320), with every switch; the published system is the default.

Where the Report names a switch without a formula, the formula is this project's choice.
"""

import numpy as np

from tests.residual import starts
from tests.residual.statements import copies, flat, mixed, normalise, permutation_mixture, sigmoid, sinkhorn

CASES = [
    {"rank": 4, **case}
    for case in (
        {},
        {"streams": 2},
        {"read": "scalar"},
        {"write": "channel"},
        {"gates": "static"},
        {"gates": "static", "read": "scalar", "write": "channel"},
        {"gate": "tanh"},
        {"gate": "tanh", "gates": "static"},
        {"gate_range": 2},
        {"gate_range": 2, "read": "scalar", "gates": "static"},
        {"mix": "free"},
        {"mix": "sinkhorn"},
        {"mix": "permutations"},
        {"norm": "shared_gain"},
        {"norm": "joint"},
        {"gate_input": "last"},
        {"gate_input": "pooled"},
        {"gate_input": "last", "mix": "free", "write": "channel"},
        {"gate_input": "pooled", "mix": "sinkhorn", "read": "scalar"},
        {"static_term": True},
        {"static_term": True, "read": "scalar", "write": "channel"},
        {"top_k": 2},
        {"top_k": 1, "read": "scalar", "gates": "static"},
        {"read": "scalar", "write": "channel", "gate": "tanh", "mix": "free", "norm": "joint", "gate_input": "pooled",
         "static_term": True, "top_k": 2},
    )
]  # fmt: skip


def start(model, tokens):
    """Pre-norm whose reads are halved (gates near one half), the last one too; writes near 1."""
    return starts.prenorm(model, tokens, read=0.5)[0], 0.03


def normed_streams(p, stream, norm, eps):
    """R̂, the streams normed and gained (eq. 30): each by itself, or all N·D values by one mean square (joint)."""
    if norm == "joint":
        return normalise(stream, eps, axis=(-2, -1)) * (1 + p["gain"])
    return normalise(stream, eps) * (1 + p["gain"])  # [N,D], or [D] for shared_gain


def gate_source(normed, gate_input):
    """What the gates' matrices see, and what their product is divided by."""
    n = normed.shape[-2]
    return {"all": (flat(normed), n), "last": (normed[..., -1, :], 1), "pooled": (normed.mean(axis=-2), 1)}[gate_input]


def gate_logits(p, normed, side, granularity, gates, gate_input, static_term):
    """The logits of the `side` (read | write) gate: [..., N] for scalar, [..., N, D] for channel."""
    n, d = normed.shape[-2:]
    vec, divisor = gate_source(normed, gate_input)
    logits = 0.0
    if gates == "dynamic":
        if granularity == "scalar":
            logits = vec @ p[f"w_{side}"] / divisor
        else:
            down, up = ("w_down", "w_up") if side == "read" else ("w_write_down", "w_write_up")
            u = vec @ p[down] / divisor  # the 1/n is inside the SiLU (eq. 31)
            logits = (u * sigmoid(u) @ p[up]).reshape(*vec.shape[:-1], n, d)
    if gates == "static" or static_term:
        logits = logits + p[f"b_{side}"]
    return logits + np.zeros((*normed.shape[:2], n, d) if granularity == "channel" else normed.shape[:3])


def gate_of(p, logits, side, gate, scale):
    """scale · σ(logits), or HC's 1 + λ tanh(logits)."""
    return 1 + p[f"lam_{side}"] * np.tanh(logits) if gate == "tanh" else scale * sigmoid(logits)


def read_of(p, stream, switches):
    """x = mean over streams of G ⊙ R̂ (eq. 31-33), and R̂."""
    s = switches
    normed = normed_streams(p, stream, s["norm"], s["eps"])
    logits = gate_logits(p, normed, "read", s["read"], s["gates"], s["gate_input"], s["static_term"])
    g = gate_of(p, logits, "read", s["gate"], s["gate_range"])
    if s["read"] == "scalar":
        g = g[..., None] + np.zeros(normed.shape)
    if s["top_k"]:
        score = g.mean(axis=-1)
        kept = score >= np.sort(score, axis=-1)[..., -s["top_k"], None]
        g = g * kept[..., None]
    return (g * normed).mean(axis=-2), normed  # a mean over all n, also of those that top_k has zeroed


SWITCHES = dict(
    read="channel", write="scalar", gates="dynamic", gate="sigmoid", gate_range=1, mix="none", norm="per_stream",
    gate_input="all", static_term=False, top_k=0, eps=1e-6,
)  # fmt: skip


def site(p, stream, y, *, k, **switches):
    """x = mean_i G_i ⊙ R̂_i; R'_i = R_i + s_i y (eq. 30-35), with every switch. The published system is the default."""
    s = SWITCHES | switches
    n = stream.shape[-2]
    x, normed = read_of(p, stream, s)
    logits = gate_logits(p, normed, "write", s["write"], s["gates"], s["gate_input"], s["static_term"])
    strength = gate_of(p, logits, "write", s["gate"], 2)
    if s["write"] == "scalar":
        strength = strength[..., None]
    kept = stream  # raw: neither normed nor gained
    if s["mix"] != "none":
        vec = flat(normed)  # of all streams, whatever gate_input: which streams the *gates* see is another axis
        logits = vec @ p["w_res"]
        if s["mix"] != "permutations":
            logits = logits.reshape(*vec.shape[:-1], n, n)
        if s["mix"] == "free":
            h_res = np.eye(n) + p["lam_res"] * np.tanh(logits / n)
        elif s["mix"] == "permutations":
            h_res = permutation_mixture(p["alpha_res"] * logits + p["b_res"], n)
        else:  # α · (W vec R̂) + b, as mHC has it: not divided by n
            h_res = sinkhorn(p["alpha_res"] * logits + p["b_res"])
        kept = mixed(h_res, stream)
    return x, kept + strength * y[:, :, None, :]


def collapse(p, stream, **switches):
    """One more read, with parameters of its own, and no norm after it."""
    final = {name.removeprefix("final."): v for name, v in p.items()}
    return read_of(final, stream, SWITCHES | switches)[0]


def expand(x, *, streams, **switches):
    return copies(x, streams)
