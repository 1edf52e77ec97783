"""The arithmetic of wide streams. Dimensions: B batch, T time, N streams, D width.

Everything here computes in float32 and rounds once, to the dtype of its result: maps and gates stay float32 whatever
the stream's or the sublayer's dtype.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from grlab.ops.matmul import matmul

F32 = jnp.float32
EXACT = jax.lax.Precision.HIGHEST  # an accelerator multiplies float32 in fewer bits unless it is told not to


def rms_normalise(x: jax.Array, eps: float, axis: int | tuple[int, ...] = -1) -> jax.Array:
    """x / sqrt(mean(x²) + eps) over `axis`, in float32."""
    x = x.astype(F32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=axis, keepdims=True) + eps)


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis with a zero-centred gain (the scale is 1 + gain), in float32.

    The convention is known here, in `GatedSite.normalise` and in the keys of Attention Residuals.
    """
    return rms_normalise(x, eps) * (1 + gain)


def project(x: jax.Array, w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x @ w for x [..., I] and w [I, O]: the product in `dtype`, accumulated and returned in float32."""
    return matmul(x.astype(dtype), w.astype(dtype), EXACT if dtype == F32 else None, F32)


def flatten(stream_BxTxNxD: jax.Array) -> jax.Array:
    """vec R, stream-major: index = stream · D + channel. Shape [B, T, N·D]."""
    *lead, n, d = stream_BxTxNxD.shape
    return stream_BxTxNxD.reshape(*lead, n * d)


def repeat(x_BxTxD: jax.Array, n: int) -> jax.Array:
    """n copies of x: [B, T, N, D]."""
    return jnp.broadcast_to(x_BxTxD[..., None, :], (*x_BxTxD.shape[:-1], n, x_BxTxD.shape[-1]))


def combine(weights_N: jax.Array, stream_BxTxNxD: jax.Array) -> jax.Array:
    """Σ_i weights_i R_i in float32: [B, T, D]. `weights_N` is [N] or [B, T, N]."""
    return jnp.sum(weights_N[..., None] * stream_BxTxNxD.astype(F32), axis=-2)


def mix(h_NxN: jax.Array, stream_BxTxNxD: jax.Array) -> jax.Array:
    """H R in float32: row i of H weighs the streams that make the new stream i. `h_NxN` is [N, N] or [B, T, N, N]."""
    return jnp.einsum("...ij,...jd->...id", h_NxN, stream_BxTxNxD.astype(F32), precision=EXACT)


def write(stream_BxTxNxD: jax.Array, s_Nx1: jax.Array, y_BxTxD: jax.Array, h_NxN: jax.Array | None = None) -> jax.Array:
    """H R + s ⊗ y (H the identity where it is None), in the stream's dtype.

    `s_Nx1` is a gate a stream, or a stream and channel: any shape that broadcasts to [B, T, N, D].
    """
    kept = stream_BxTxNxD.astype(F32) if h_NxN is None else mix(h_NxN, stream_BxTxNxD)
    return (kept + s_Nx1 * y_BxTxD.astype(F32)[..., None, :]).astype(stream_BxTxNxD.dtype)


def add(stream_BxTxNxD: jax.Array, f) -> jax.Array:
    """R + f(R), in the stream's dtype."""
    return (stream_BxTxNxD.astype(F32) + f(stream_BxTxNxD)).astype(stream_BxTxNxD.dtype)


def permutation_mixture(logits_P: jax.Array, n: int) -> jax.Array:
    """Σ_p softmax(logits)_p P_p over the P = n! permutations of n streams (mHC-lite, arXiv 2601.05732).

    It is doubly stochastic by construction. The order is `itertools.permutations`'s, the identity first. `logits_P` is
    [.., P]; the result [.., N, N], float32.
    """
    weights_P = jax.nn.softmax(logits_P.astype(F32), axis=-1)
    return jnp.einsum("...p,pij->...ij", weights_P, permutations(n), precision=EXACT)


def permutations(n: int) -> np.ndarray:
    """The n! permutation matrices [P, N, N], the identity first."""
    return np.eye(n, dtype=np.float32)[np.array(list(itertools.permutations(range(n))))]
