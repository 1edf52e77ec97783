"""What each residual system computes, stated once more in float64 NumPy: the oracle of `test_statements.py`.

Written from the papers' equations, not from `grlab.residual`, and for reading rather than speed: explicit axes, no
shared machinery beyond a norm, a sigmoid and a Sinkhorn projection. A system is one function

    x [B,T,D], new_stream = system(p, stream, y, ...)        y [B,T,D]; stream [B,T,N,D], pre-norm's [B,T,D]

and one for the end of the model, x [B,T,D] = system_collapse(p, stream, ...). `p` is a dict of float64 arrays under the
names of the modules' parameters, weight matrices [in, out], norm gains zero-centred (the scale is 1 + gain). y is an
argument of its own rather than a function of x, so that a gradient with respect to x and one to the new stream are
separate.

Sources: GR, Report eq. 30-35 (arXiv 2608.30320); HC, arXiv 2409.19606 section 2-3; mHC, arXiv 2512.24880 section 4, and
transformers' `deepseek_v4` for form "deepseek_v4". Where the Report names a switch without a formula, the formula is
this project's choice and the comment says so.
"""

from collections.abc import Callable, Mapping

import numpy as np

Params = Mapping[str, np.ndarray]


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


def normalise(v, eps, axis=-1):
    """v over its root mean square along `axis`, eps inside the root."""
    return v / np.sqrt(np.mean(v**2, axis=axis, keepdims=True) + eps)


def flat(v):
    """[..., N, D] -> [..., N·D], stream-major: index = stream · D + channel."""
    return v.reshape(*v.shape[:-2], -1)


def sinkhorn(logits, iterations=20):
    """exp(logits), then `iterations` times: every column to sum 1, then every row to sum 1 (mHC eq. 9)."""
    m = np.exp(logits - logits.max(axis=(-2, -1), keepdims=True))
    for _ in range(iterations):
        m = m / m.sum(axis=-2, keepdims=True)
        m = m / m.sum(axis=-1, keepdims=True)
    return m


def mixed(h, stream):
    """H · R: stream i of the result is the sum over j of H[i, j] R_j."""
    return np.einsum("...ij,...jd->...id", h, stream)


# Pre-norm ------------------------------------------------------------------------------------------------------------


def prenorm(p: Params, stream, y, eps=1e-6):
    """x = RMSNorm(R), R' = R + y."""
    return normalise(stream, eps) * (1 + p["norm_gain"]), stream + y


def prenorm_collapse(p: Params, stream, eps=1e-6):
    return normalise(stream, eps) * (1 + p["final_gain"])


# Hyper-Connections ---------------------------------------------------------------------------------------------------


def hc(p: Params, stream, y, *, dynamic=True, tanh=True, eps=1e-6):
    """h0 = A_mᵀ R, x = norm(h0), R' = A_rᵀ R + Bᵀ y; the dynamic parts from the streams, each normed by itself."""
    squash = np.tanh if tanh else lambda v: v
    a_m, a_r, b = p["a_m"], p["a_r"], p["b"]  # [N], [N,N], [N]
    if dynamic:
        normed = normalise(stream, eps) * (1 + p["dyn_gain"])
        b = b + p["s_beta"] * squash(np.einsum("btnd,d->btn", normed, p["w_beta"]))
        a_m = a_m + p["s_alpha"] * squash(np.einsum("btnd,d->btn", normed, p["w_m"]))
        a_r = a_r + p["s_alpha"] * squash(np.einsum("btnd,dk->btnk", normed, p["w_r"]))
    batch = stream.shape[:2]
    a_m, b = (np.broadcast_to(v, (*batch, *v.shape[-1:])) for v in (a_m, b))
    a_r = np.broadcast_to(a_r, (*batch, *a_r.shape[-2:]))
    h0 = np.einsum("btn,btnd->btd", a_m, stream)
    width = np.einsum("btik,btid->btkd", a_r, stream)  # transposed: the sum is over A_r's first index
    depth = np.einsum("btk,btd->btkd", b, y)
    return normalise(h0, eps) * (1 + p["norm_gain"]), width + depth


def hc_collapse(p: Params, stream, eps=1e-6):
    """The sum of the streams, then the final norm; its eps times N² (chosen here): N equal streams end as one would."""
    return normalise(stream.sum(axis=-2), eps * stream.shape[-2] ** 2) * (1 + p["final_gain"])


# Manifold-constrained Hyper-Connections ------------------------------------------------------------------------------


def mhc(p: Params, stream, y, *, dynamic=True, form="paper", iterations=20, eps=1e-6):
    """x = norm(H_pre R), R' = H_res R + H_postᵀ y; H̃ = α (RMSNorm(vec R) φ) + b; σ, 2σ, Sinkhorn of exp."""
    n = stream.shape[-2]
    pre, post, res = p["b_pre"], p["b_post"], p["b_res"]
    if dynamic:
        vec = normalise(flat(stream), eps)  # one norm over all N·D, without a gain
        pre = p["alpha_pre"] * (vec @ p["phi_pre"]) + pre
        post = p["alpha_post"] * (vec @ p["phi_post"]) + post
        res = p["alpha_res"] * (vec @ p["phi_res"]).reshape(*vec.shape[:-1], n, n) + res
    h_pre, h_post = sigmoid(pre), 2 * sigmoid(post)
    if form == "paper":
        h_res = sinkhorn(res, iterations)
    else:  # softmax over the last axis, columns last, applied transposed; eps of 1e-6 in every map
        h_pre = h_pre + 1e-6
        comb = np.exp(res - res.max(axis=-1, keepdims=True))
        comb = comb / comb.sum(axis=-1, keepdims=True) + 1e-6
        comb = comb / (comb.sum(axis=-2, keepdims=True) + 1e-6)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(axis=-1, keepdims=True) + 1e-6)
            comb = comb / (comb.sum(axis=-2, keepdims=True) + 1e-6)
        h_res = np.swapaxes(comb, -1, -2)
    x = normalise((h_pre[..., None] * stream).sum(axis=-2), eps) * (1 + p["norm_gain"])
    return x, mixed(h_res, stream) + h_post[..., None] * y[:, :, None, :]


def mhc_collapse(p: Params, stream, *, form="paper", eps=1e-6):
    """Sum of the streams (chosen here: the paper states none) or deepseek_v4's learned head, then the final norm."""
    if form == "paper":
        return hc_collapse(p, stream, eps)
    logits = p["head_alpha"] * (normalise(flat(stream), eps) @ p["head_phi"]) + p["head_b"]
    u = ((sigmoid(logits) + 1e-6)[..., None] * stream).sum(axis=-2)
    return normalise(u, eps) * (1 + p["final_gain"])


# Gated Residual ------------------------------------------------------------------------------------------------------


def gr_normed(p: Params, stream, norm, eps):
    """R̂, the streams normed and gained (eq. 30): each by itself, or all N·D values by one mean square (joint)."""
    if norm == "joint":
        return normalise(stream, eps, axis=(-2, -1)) * (1 + p["gain"])
    return normalise(stream, eps) * (1 + p["gain"])  # [N,D], or [D] for shared_gain


def gr_input(normed, gate_input):
    """What the gates' matrices see, and what their product is divided by."""
    n = normed.shape[-2]
    return {"all": (flat(normed), n), "last": (normed[..., -1, :], 1), "pooled": (normed.mean(axis=-2), 1)}[gate_input]


def gr_logits(p: Params, normed, side, granularity, gates, gate_input, static_term):
    """The logits of the `side` (read | write) gate: [..., N] for scalar, [..., N, D] for channel."""
    n, d = normed.shape[-2:]
    vec, divisor = gr_input(normed, gate_input)
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


def gr_gate(p: Params, logits, side, gate, scale):
    """scale · σ(logits), or HC's 1 + λ tanh(logits)."""
    return 1 + p[f"lam_{side}"] * np.tanh(logits) if gate == "tanh" else scale * sigmoid(logits)


def gr_read(p: Params, stream, switches):
    """x = mean over streams of G ⊙ R̂ (eq. 31-33), and R̂."""
    s = switches
    normed = gr_normed(p, stream, s["norm"], s["eps"])
    logits = gr_logits(p, normed, "read", s["read"], s["gates"], s["gate_input"], s["static_term"])
    g = gr_gate(p, logits, "read", s["gate"], s["gate_range"])
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


def gr(p: Params, stream, y, **switches):
    """x = mean_i G_i ⊙ R̂_i; R'_i = R_i + s_i y (eq. 30-35), with every switch. The published system is the default."""
    s = SWITCHES | switches
    n = stream.shape[-2]
    x, normed = gr_read(p, stream, s)
    logits = gr_logits(p, normed, "write", s["write"], s["gates"], s["gate_input"], s["static_term"])
    strength = gr_gate(p, logits, "write", s["gate"], 2)
    if s["write"] == "scalar":
        strength = strength[..., None]
    kept = stream  # raw: neither normed nor gained
    if s["mix"] != "none":
        vec = flat(normed)  # of all streams, whatever gate_input: which streams the *gates* see is another axis
        logits = (vec @ p["w_res"]).reshape(*vec.shape[:-1], n, n)
        if s["mix"] == "free":
            h_res = np.eye(n) + p["lam_res"] * np.tanh(logits / n)
        else:  # α · (W vec R̂) + b, as mHC has it: not divided by n
            h_res = sinkhorn(p["alpha_res"] * logits + p["b_res"])
        kept = mixed(h_res, stream)
    return x, kept + strength * y[:, :, None, :]


def gr_collapse(p: Params, stream, **switches):
    """One more read, with parameters of its own, and no norm after it."""
    return gr_read(p, stream, SWITCHES | switches)[0]


# Gradients -----------------------------------------------------------------------------------------------------------


def finite_differences(f: Callable[[dict], float], at: Mapping[str, np.ndarray], step=1e-5) -> dict[str, np.ndarray]:
    """The gradient of the scalar f at `at`, entry by entry, by central differences in float64.

    Where values and third derivatives are of order 1 the error is about 1e-10: step² of truncation, 1e-16/step of
    rounding.
    """
    gradients = {}
    for name, value in at.items():
        gradients[name] = np.zeros(np.shape(value))
        for index in np.ndindex(np.shape(value)):
            ends = []
            for by in (step, -step):
                moved = np.array(value, dtype=np.float64)
                moved[index] += by
                ends.append(f({**at, name: moved}))
            gradients[name][index] = (ends[0] - ends[1]) / (2 * step)
    return gradients
