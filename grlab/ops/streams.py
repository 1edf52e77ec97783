"""The arithmetic of wide streams. Dimensions: B batch, T time, N streams, D width.

Everything here computes in float32 and rounds once, to the dtype of its result: maps and gates stay float32 whatever
the stream's or the sublayer's dtype.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from grlab.ops import write_tpu
from grlab.ops.matmul import matmul
from grlab.ops.mesh import on_each_device
from grlab.ops.tpu import where_it_fits

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


@jax.custom_vjp
def combine(weights_N: jax.Array, stream_BxTxNxD: jax.Array) -> jax.Array:
    """Σ_i weights_i R_i in float32: [B, T, D]. `weights_N` is [N] or [B, T, N]."""
    # Sums over the streams are written out: on a CPU XLA makes one vectorised pass of them, of a reduction it does not.
    return sum(weights_N[..., i, None] * stream_BxTxNxD[..., i, :].astype(F32) for i in range(weights_N.shape[-1]))


def _combine_backward(kept, dx_BxTxD):
    weights_N, stream_BxTxNxD = kept
    dstream_BxTxNxD = weights_N[..., None] * dx_BxTxD[..., None, :]
    return _as(weights_N, _dots(stream_BxTxNxD, dx_BxTxD)), _as(stream_BxTxNxD, dstream_BxTxNxD)


combine.defvjp(lambda *args: (combine(*args), args), _combine_backward)


def mix(h_NxN: jax.Array, stream_BxTxNxD: jax.Array) -> jax.Array:
    """H R in float32: row i of H weighs the streams that make the new stream i. `h_NxN` is [N, N] or [B, T, N, N]."""
    n = h_NxN.shape[-1]
    return sum(h_NxN[..., :, j, None] * stream_BxTxNxD[..., j, None, :].astype(F32) for j in range(n))


def write(stream_BxTxNxD: jax.Array, s_Nx1: jax.Array, y_BxTxD: jax.Array, h_NxN: jax.Array | None = None) -> jax.Array:
    """H R + s ⊗ y (H the identity where it is None), in the stream's dtype.

    `s_Nx1` is a gate a stream, or a stream and channel: any shape that broadcasts to [B, T, N, D].
    """
    if not _has_kernels(stream_BxTxNxD, s_Nx1, h_NxN):
        return _write(stream_BxTxNxD, s_Nx1, y_BxTxD, h_NxN)
    gates = {"s_Nx1": s_Nx1} | ({} if h_NxN is None else {"h_NxN": h_NxN})
    of_batch = {name: gate for name, gate in gates.items() if gate.ndim > 2}
    static = {name: gate for name, gate in gates.items() if gate.ndim == 2}

    def here(stream_BxTxNxD, y_BxTxD, of_batch, static):
        return _write(stream_BxTxNxD, y_BxTxD=y_BxTxD, **({"h_NxN": None} | of_batch | static))

    return on_each_device(here, (stream_BxTxNxD, y_BxTxD, of_batch), (static,))


def _has_kernels(stream_BxTxNxD, s_Nx1, h_NxN):
    """Whether a TPU has kernels for this write."""
    *lead, n, d = stream_BxTxNxD.shape
    return s_Nx1.shape[-1] == 1 and write_tpu.fits(math.prod(lead), n, d, stream_BxTxNxD.dtype)


@jax.custom_vjp
def _write(stream_BxTxNxD, s_Nx1, y_BxTxD, h_NxN):
    def fused(stream_BxTxNxD, s_Nx1, y_BxTxD, h_NxN):
        new_TxNxD = write_tpu.forward(*_tokens(stream_BxTxNxD, s_Nx1, y_BxTxD, h_NxN))
        return new_TxNxD.reshape(stream_BxTxNxD.shape)

    args = (stream_BxTxNxD, s_Nx1, y_BxTxD, h_NxN)
    return where_it_fits(_has_kernels(stream_BxTxNxD, s_Nx1, h_NxN), fused, plain_write, *args)


def _write_backward(kept, dout_BxTxNxD):
    stream_BxTxNxD, s_Nx1, y_BxTxD, h_NxN = kept

    def fused(stream_BxTxNxD, s_Nx1, y_BxTxD, h_NxN, dout_BxTxNxD):
        n = stream_BxTxNxD.shape[-2]
        dout_TxNxD = dout_BxTxNxD.reshape(-1, *dout_BxTxNxD.shape[-2:])
        args = _tokens(stream_BxTxNxD, s_Nx1, y_BxTxD, h_NxN)
        dstream_TxNxD, dgates_TxG, dy_TxD = write_tpu.backward(*args, dout_TxNxD)
        dgates_BxTxG = dgates_TxG.reshape(*y_BxTxD.shape[:-1], -1)
        ds, dh = _as(s_Nx1, dgates_BxTxG[..., -n:, None]), None
        if h_NxN is not None:
            dh = _as(h_NxN, dgates_BxTxG[..., :-n].reshape(*y_BxTxD.shape[:-1], n, n))
        return dstream_TxNxD.reshape(stream_BxTxNxD.shape), ds, dy_TxD.reshape(y_BxTxD.shape), dh

    fits = _has_kernels(stream_BxTxNxD, s_Nx1, h_NxN)
    return where_it_fits(fits, fused, _plain_write_backward, *kept, dout_BxTxNxD)


_write.defvjp(lambda *args: (_write(*args), args), _write_backward)


def _tokens(stream_BxTxNxD, s_Nx1, y_BxTxD, h_NxN):
    """What the kernels take: the streams, the gates (H row by row, then s) and y, of all tokens one after the other."""
    *lead, n, d = stream_BxTxNxD.shape
    gates = [] if h_NxN is None else [jnp.broadcast_to(h_NxN, (*lead, n, n)).reshape(-1, n * n)]
    gates.append(jnp.broadcast_to(s_Nx1[..., 0], (*lead, n)).reshape(-1, n))
    return stream_BxTxNxD.reshape(-1, n, d), jnp.concatenate(gates, axis=-1).astype(F32), y_BxTxD.reshape(-1, d)


def plain_write(stream_BxTxNxD, s_Nx1, y_BxTxD, h_NxN=None):
    """`write` without kernels, for what has a derivative of its own."""
    kept = stream_BxTxNxD.astype(F32) if h_NxN is None else mix(h_NxN, stream_BxTxNxD)
    return (kept + s_Nx1 * y_BxTxD.astype(F32)[..., None, :]).astype(stream_BxTxNxD.dtype)


def _plain_write_backward(stream_BxTxNxD, s_Nx1, y_BxTxD, h_NxN, dout_BxTxNxD):
    dout_BxTxNxD = dout_BxTxNxD.astype(F32)
    dy_BxTxD = sum(s_Nx1[..., i, :] * dout_BxTxNxD[..., i, :] for i in range(s_Nx1.shape[-2]))
    if s_Nx1.shape[-1] == 1:
        ds = _dots(dout_BxTxNxD, y_BxTxD)[..., None]
    else:
        ds = dout_BxTxNxD * y_BxTxD.astype(F32)[..., None, :]
    if h_NxN is None:
        dstream_BxTxNxD, dh = dout_BxTxNxD, None
    else:
        dstream_BxTxNxD = mix(jnp.swapaxes(h_NxN, -1, -2), dout_BxTxNxD)
        dh = jnp.einsum("...id,...jd->...ij", dout_BxTxNxD, stream_BxTxNxD.astype(F32), precision=EXACT)
        dh = _as(h_NxN, dh)
    return _as(stream_BxTxNxD, dstream_BxTxNxD), _as(s_Nx1, ds), _as(y_BxTxD, dy_BxTxD), dh


def _dots(stream_BxTxNxD: jax.Array, x_BxTxD: jax.Array) -> jax.Array:
    """The product of each stream with x in float32: [B, T, N]."""
    return jnp.einsum("...nd,...d->...n", stream_BxTxNxD.astype(F32), x_BxTxD.astype(F32), precision=EXACT)


def _as(x: jax.Array, cotangent: jax.Array) -> jax.Array:
    """The cotangent of x of that of x broadcast along new leading axes."""
    return jnp.sum(cotangent, axis=tuple(range(cotangent.ndim - x.ndim))).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_project(x: jax.Array, w_IxO: jax.Array, eps: float) -> jax.Array:
    """RMSNorm(x) @ w in float32, the norm over the last axis of x [..., I] and without a gain: [..., O].

    The normed x is never made: its scale, a number a row, is taken out of the product, and out of its derivative.
    """
    return _rms_project_forward(x, w_IxO, eps)[0]


def _rms_project_forward(x, w_IxO, eps):
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(F32)), axis=-1, keepdims=True) + eps)
    out = scale * project(x, w_IxO, F32)
    return out, (x, w_IxO, scale, out)


def _rms_project_backward(eps, kept, dout):
    del eps
    x, w_IxO, scale, out = kept
    _, vjp = jax.vjp(lambda x, w: project(x, w, F32), x.astype(F32), w_IxO)
    dx, dw = vjp(scale * dout)
    along = jnp.sum(dout * out, axis=-1, keepdims=True) / x.shape[-1]
    return (dx - jnp.square(scale) * along * x.astype(F32)).astype(x.dtype), dw


rms_project.defvjp(_rms_project_forward, _rms_project_backward)


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
