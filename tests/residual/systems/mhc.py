"""mHC, arXiv 2512.24880 section 4: x = norm(H_pre R), R' = H_res R + H_postᵀ y; H̃ = α (RMSNorm(vec R) φ) + b.

Form deepseek_v4 is transformers' `deepseek_v4`, form lite arXiv 2601.05732.
"""

import numpy as np

from tests.residual import starts
from tests.residual.statements import (
    copies,
    end_of_sum,
    final_norm,
    flat,
    mixed,
    norm,
    normalise,
    permutation_mixture,
    sigmoid,
    sinkhorn,
)

# At few iterations the columns are still far from their sum, so that the order of the normalisations shows (and the
# unrolled loop compiles sooner; 20 are in the first row and in the goldens).
CASES = [
    {},
    {"form": "deepseek_v4", "iterations": 3},
    {"dynamic": False, "iterations": 2},
    {"dynamic": False, "iterations": 2, "form": "deepseek_v4"},
    {"form": "lite"},
    {"form": "lite", "dynamic": False, "gated_norm": 3},
]


def start(model, tokens):
    """The stream of pre-norm within 1 %, and so its logits."""
    return starts.prenorm(model, tokens)[0], 0.02


def site(p, stream, y, *, k, eps, dynamic=True, form="paper", iterations=20, **switches):
    n = stream.shape[-2]
    pre, post, res = p["b_pre"], p["b_post"], p["b_res"]
    if dynamic:
        vec = normalise(flat(stream), eps)  # one norm over all N·D, without a gain
        pre = p["alpha_pre"] * (vec @ p["phi_pre"]) + pre
        post = p["alpha_post"] * (vec @ p["phi_post"]) + post
        res = p["alpha_res"] * (vec @ p["phi_res"]).reshape(*vec.shape[:-1], *res.shape) + res
    h_pre, h_post = sigmoid(pre), 2 * sigmoid(post)
    if form == "paper":
        h_res = sinkhorn(res, iterations)
    elif form == "lite":
        h_res = permutation_mixture(res, n)
    else:  # softmax over the last axis, columns last, applied transposed; eps of 1e-6 in every map
        h_pre = h_pre + 1e-6
        comb = np.exp(res - res.max(axis=-1, keepdims=True))
        comb = comb / comb.sum(axis=-1, keepdims=True) + 1e-6
        comb = comb / (comb.sum(axis=-2, keepdims=True) + 1e-6)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(axis=-1, keepdims=True) + 1e-6)
            comb = comb / (comb.sum(axis=-2, keepdims=True) + 1e-6)
        h_res = np.swapaxes(comb, -1, -2)
    x = norm(p, (h_pre[..., None] * stream).sum(axis=-2), eps)
    return x, mixed(h_res, stream) + h_post[..., None] * y[:, :, None, :]


def collapse(p, stream, *, eps, form="paper", **switches):
    """Sum of the streams (chosen here: the paper states none) or deepseek_v4's learned head, then the final norm."""
    if form != "deepseek_v4":
        return end_of_sum(p, stream, eps)
    logits = p["head_alpha"] * (normalise(flat(stream), eps) @ p["phi_head"]) + p["head_b"]
    return final_norm(p, ((sigmoid(logits) + 1e-6)[..., None] * stream).sum(axis=-2), eps)


def expand(x, *, streams, **switches):
    return copies(x, streams)
