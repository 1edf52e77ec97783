"""What the statements of `tests/residual/systems/` share: float64 NumPy, for reading rather than speed."""

import itertools
from collections.abc import Callable, Mapping

import numpy as np

Params = Mapping[str, np.ndarray]


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


def silu(v):
    return v * sigmoid(v)


def softmax(v, axis=-1):
    v = np.exp(v - v.max(axis=axis, keepdims=True))
    return v / v.sum(axis=axis, keepdims=True)


def normalise(v, eps, axis=-1):
    """v over its root mean square along `axis`, eps inside the root."""
    return v / np.sqrt(np.mean(v**2, axis=axis, keepdims=True) + eps)


def norm(p: Params, v, eps, name="norm"):
    """RMSNorm with the gain `name`.gain; where `name` has a bias LayerNorm, where it has matrices GatedNorm.

    GatedNorm (arXiv 2601.22966): u ⊙ σ(W_up SiLU(W_down u)) with u the norm.
    """
    if f"{name}.bias" in p:
        v = v - v.mean(axis=-1, keepdims=True)
    u = normalise(v, eps) * (1 + p[f"{name}.gain"]) + p.get(f"{name}.bias", 0.0)
    if f"{name}.w_down" in p:
        u = u * sigmoid(silu(u @ p[f"{name}.w_down"]) @ p[f"{name}.w_up"])
    return u


def final_norm(p: Params, v, eps):
    """The norm before the head."""
    return norm(p, v, eps, "final_norm")


def flat(v):
    """[..., N, D] -> [..., N·D], stream-major: index = stream · D + channel."""
    return v.reshape(*v.shape[:-2], -1)


def copies(x, n):
    """n streams that are x."""
    return np.stack([x] * n, axis=-2)


def end_of_sum(p: Params, stream, eps):
    """The sum of the streams, then the final norm; its eps times N² (chosen here): N equal streams end as one would."""
    return final_norm(p, stream.sum(axis=-2), eps * stream.shape[-2] ** 2)


def sinkhorn(logits, iterations=20):
    """exp(logits), then `iterations` times: every column to sum 1, then every row to sum 1 (mHC eq. 9)."""
    m = np.exp(logits - logits.max(axis=(-2, -1), keepdims=True))
    for _ in range(iterations):
        m = m / m.sum(axis=-2, keepdims=True)
        m = m / m.sum(axis=-1, keepdims=True)
    return m


def permutation_mixture(logits, n):
    """The matrix whose row i puts weight softmax(logits)_p on column p(i), over all permutations p in their order."""
    weights = softmax(logits)
    m = np.zeros((*logits.shape[:-1], n, n))
    for index, p in enumerate(itertools.permutations(range(n))):
        for i in range(n):
            m[..., i, p[i]] += weights[..., index]
    return m


def mixed(h, stream):
    """H · R: stream i of the result is the sum over j of H[i, j] R_j."""
    return np.einsum("...ij,...jd->...id", h, stream)


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
