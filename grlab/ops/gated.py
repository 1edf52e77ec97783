"""The read of Gated Residuals, alone and with the write before it, as operations that keep one array of the streams.

arXiv 2608.30320, eq. 30-35. Dimensions: B batch, T time or all tokens, N streams, D width, R rank, M further
projections, I the R + M projections of the normed streams.
"""

import functools

import jax
import jax.numpy as jnp

from grlab.ops import gated_tpu, streams
from grlab.ops.mesh import on_each_device
from grlab.ops.streams import EXACT, F32
from grlab.ops.tpu import where_it_fits


def read(
    stream_BxTxNxD: jax.Array,
    gain_NxD: jax.Array,
    w_down: jax.Array,
    w_up: jax.Array,
    w_more: jax.Array,
    eps: float,
    reach: float,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """The gated mean of the normed streams, and further projections of them.

        R̂_i = RMSNorm(R_i) ⊙ (1 + gain_i);   G = reach σ(W_up SiLU(W_down vec R̂ / n));   x = mean_i G_i ⊙ R̂_i

    Args:
      stream_BxTxNxD: R.
      gain_NxD: zero-centred; [D] where all streams have one.
      w_down: [N·D, R].
      w_up: [R, N·D].
      w_more: [N·D, M].
      eps: of the norm.
      reach: of the gates.
      dtype: what the products are of; they are accumulated in float32, which is also what all else is of.

    Returns:
      x [B, T, D] in `dtype`, and vec R̂ W_more [B, T, M] in float32.
    """
    return _on_each_device((stream_BxTxNxD,), (gain_NxD, w_down, w_up, w_more), eps, reach, dtype)


def write_read(
    stream_BxTxNxD: jax.Array,
    s_BxTxN: jax.Array,
    y_BxTxD: jax.Array,
    gain_NxD: jax.Array,
    w_down: jax.Array,
    w_up: jax.Array,
    w_more: jax.Array,
    eps: float,
    reach: float,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """R' = R + s ⊗ y in the streams' dtype, and the `read` of R': (R', x, vec R̂' W_more).

    One operation, so that a kernel has each stream come and go once; and so has its derivative, which is that of the
    write, of the read, and of whatever else uses R'.
    """
    weights = (gain_NxD, w_down, w_up, w_more)
    return _on_each_device((stream_BxTxNxD, s_BxTxN, y_BxTxD), weights, eps, reach, dtype)


def _on_each_device(of_tokens, weights, eps, reach, dtype):
    dtype = jnp.dtype(dtype)

    def here(stream_BxTxNxD, *rest):
        *written, gain_NxD, w_down, w_up, w_more = rest
        *lead, n, d = stream_BxTxNxD.shape
        # The streams first: products are then of a stream each, and no pass over the tokens is one of [T, N·D], the
        # index of which XLA on a CPU takes apart for each value (54 µs in place of 8 for 65,536 values).
        w_in_NxDxI = jnp.concatenate([w_down, w_more], axis=1).reshape(n, d, -1)
        w_up_NxRxD = jnp.moveaxis(w_up.reshape(-1, n, d), 1, 0)
        stream_TxNxD = stream_BxTxNxD.reshape(-1, n, d)
        written = tuple(x.reshape(-1, x.shape[-1]) for x in written)
        gain_NxD = jnp.broadcast_to(gain_NxD, (n, d))
        out = _write_read(stream_TxNxD, written, gain_NxD, w_in_NxDxI, w_up_NxRxD, eps, reach, dtype)
        return tuple(x.reshape(*lead, *x.shape[1:]) for x in out)

    gain_NxD, *matrices = weights
    return on_each_device(here, of_tokens, (gain_NxD, *(w.astype(dtype) for w in matrices)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _write_read(stream_TxNxD, written, gain_NxD, w_in_NxDxI, w_up_NxRxD, eps, reach, dtype):
    """(R', x, further projections) where `written` is (s [T, N], y [T, D]); the last two of R where it is ()."""
    return _forward(stream_TxNxD, written, gain_NxD, w_in_NxDxI, w_up_NxRxD, eps, reach, dtype)[0]


def _forward(stream_TxNxD, written, gain_NxD, w_in_NxDxI, w_up_NxRxD, eps, reach, dtype):
    args = (stream_TxNxD, gain_NxD, w_in_NxDxI, w_up_NxRxD)
    *new, x_TxD, a_TxR, more_TxM = _one_of(gated_tpu.forward, _plain_forward, args, written, eps, reach, dtype)
    (kept_TxNxD,) = new or [stream_TxNxD]
    return (*new, x_TxD, more_TxM), (kept_TxNxD, *args[1:], a_TxR, written)


def _backward(eps, reach, dtype, kept, cotangents):
    *args, a_TxR, written = kept
    *dnew, dx_TxD, dmore_TxM = cotangents
    more = (a_TxR, dx_TxD, dmore_TxM, *dnew, *written)
    grads = _one_of(gated_tpu.backward, _plain_backward, args, more, eps, reach, dtype)
    grads = [grad.astype(x.dtype) for grad, x in zip(grads, (*args, *written), strict=True)]
    return grads[0], tuple(grads[4:]), *grads[1:4]


_write_read.defvjp(_forward, _backward)


def _one_of(fused, plain, args, more, eps, reach, dtype):
    """The result of `fused` where the program is for a TPU that it fits on, of `plain` elsewhere."""
    settings = {"eps": eps, "reach": reach, "dtype": dtype}
    fused, plain = (functools.partial(f, **settings) for f in (fused, plain))
    return where_it_fits(gated_tpu.fits(*args, dtype), fused, plain, *args, *more)


def _plain_forward(stream_TxNxD, gain_NxD, w_in_NxDxI, w_up_NxRxD, *written, eps, reach, dtype):
    """R' = R + s ⊗ y and, of it, x and the projections [T, R] and [T, M] in float32; without s, y all but R' of R."""
    n, r, _ = w_up_NxRxD.shape
    new = []
    if written:
        s_TxN, y_TxD = written
        stream_TxNxD = streams.plain_write(stream_TxNxD, s_TxN[..., None], y_TxD)
        new = [stream_TxNxD]
    normed_NxTxD, _, _ = _normed(stream_TxNxD, gain_NxD, eps)
    out_TxI = sum(_dots(normed_NxTxD, w_in_NxDxI, 2, 1, dtype))
    _, t_NxTxD = _gates(out_TxI[:, :r], w_up_NxRxD, dtype)
    x_TxD = reach / n * sum((0.5 + 0.5 * t_NxTxD[i]) * normed_NxTxD[i] for i in range(n))
    return *new, x_TxD.astype(dtype), out_TxI[:, :r], out_TxI[:, r:]


def _plain_backward(
    stream_TxNxD, gain_NxD, w_in_NxDxI, w_up_NxRxD, a_TxR, dx_TxD, dmore_TxM, *written, eps, reach, dtype
):
    """The gradients of the streams and of the weights; after a write `written` is the cotangent of R', s and y.

    The streams are then R', the first gradient is that of R and of R', and those of s and y follow.
    """
    n, d = gain_NxD.shape
    normed_NxTxD, unit_NxTxD, scale_NxTx1 = _normed(stream_TxNxD, gain_NxD, eps)  # what was not kept, once more
    z_TxR, t_NxTxD = _gates(a_TxR, w_up_NxRxD, dtype)

    dx_TxD = reach / n * dx_TxD.astype(F32)
    dlogits_NxTxD = 0.25 * dx_TxD * normed_NxTxD * (1 - t_NxTxD * t_NxTxD)
    dw_up_NxRxD = _dots(_copies(z_TxR, n), dlogits_NxTxD, 1, 1, dtype)
    dz_TxR = sum(_dots(dlogits_NxTxD, w_up_NxRxD, 2, 2, dtype))
    sigma_TxR = jax.nn.sigmoid(a_TxR / n)
    da_TxR = dz_TxR * sigma_TxR * (1 + a_TxR / n * (1 - sigma_TxR)) / n

    dout_NxTxI = _copies(jnp.concatenate([da_TxR, dmore_TxM], axis=1), n)
    # The wider factor is not the one to transpose, see grlab/ops/matmul.py.
    dw_in_NxIxD = jax.lax.optimization_barrier(_dots(dout_NxTxI, normed_NxTxD, 1, 1, dtype))
    dnormed_NxTxD = dx_TxD * (0.5 + 0.5 * t_NxTxD) + _dots(dout_NxTxI, w_in_NxDxI, 2, 2, dtype)
    dgain_NxD = jnp.sum(dnormed_NxTxD * unit_NxTxD, axis=1)
    along_NxTx1 = jnp.einsum("ntd,ntd->nt", dnormed_NxTxD, normed_NxTxD, precision=EXACT)[..., None] / d
    dstream_NxTxD = scale_NxTx1 * (dnormed_NxTxD * (1 + gain_NxD)[:, None] - along_NxTx1 * unit_NxTxD)
    dstream_TxNxD = jnp.moveaxis(dstream_NxTxD, 0, 1)
    dweights = (dgain_NxD, jnp.swapaxes(dw_in_NxIxD, 1, 2), dw_up_NxRxD)
    if not written:
        return dstream_TxNxD.astype(stream_TxNxD.dtype), *dweights
    dnew_TxNxD, s_TxN, y_TxD = written
    dstream_TxNxD = dstream_TxNxD + dnew_TxNxD
    ds_TxN = jnp.einsum("tnd,td->tn", dstream_TxNxD, y_TxD.astype(F32), precision=EXACT)
    dy_TxD = sum(s_TxN[:, i, None] * dstream_TxNxD[:, i] for i in range(n))
    return dstream_TxNxD.astype(stream_TxNxD.dtype), *dweights, ds_TxN, dy_TxD.astype(y_TxD.dtype)


def _normed(stream_TxNxD, gain_NxD, eps):
    """(R̂, RMSNorm(R), its scale [N, T, 1]) in float32."""
    stream_TxNxD = stream_TxNxD.astype(F32)
    mean_TxN = jnp.mean(jnp.square(stream_TxNxD), axis=-1)
    scale_NxTx1 = jax.lax.rsqrt(mean_TxN + eps).T[..., None]
    unit_NxTxD = jnp.moveaxis(stream_TxNxD, 1, 0) * scale_NxTx1
    return unit_NxTxD * (1 + _held(gain_NxD))[:, None], unit_NxTxD, scale_NxTx1


def _held(x_NxD):
    """x, as an array of its own on a CPU.

    Into the passes over the streams XLA fuses the slicing of x out of the parameters of all layers, and they take four
    times as long; a product with the identity it does not fuse.
    """

    def product(x_NxD):
        return jnp.matmul(jnp.eye(len(x_NxD)), x_NxD, precision=EXACT)

    return jax.lax.platform_dependent(x_NxD, cpu=product, default=lambda x: x)


def _gates(a_TxR, w_up_NxRxD, dtype):
    """(SiLU(a / n), t [N, T, D]); the gates are reach · (1 + t) / 2: on a CPU tanh takes two thirds of σ's time."""
    n = len(w_up_NxRxD)
    z_TxR = jax.nn.silu(a_TxR / n)
    return z_TxR, jnp.tanh(_dots(_copies(0.5 * z_TxR, n), w_up_NxRxD, 2, 1, dtype))


def _copies(x, n: int):
    return jnp.broadcast_to(x, (n, *x.shape))


def _dots(a, b, a_axis: int, b_axis: int, dtype):
    """The product of the matrices of each stream in `dtype`, accumulated in float32."""
    dimensions = (((a_axis,), (b_axis,)), ((0,), (0,)))
    precision = EXACT if dtype == F32 else None
    a, b = a.astype(dtype), b.astype(dtype)
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=F32)
