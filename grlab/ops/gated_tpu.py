"""The read of Gated Residuals and its derivative as one pass over the streams each, for TPUs (Pallas, Mosaic).

The arithmetic is that of grlab/ops/gated.py, in the same types; the names of dimensions are its, too. A block is some
tokens of all streams at their full width; the weights stay on the chip.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from grlab.ops.tpu import F32, VMEM, by_tokens, dot, whole

FORWARD_TOKENS, BACKWARD_TOKENS = 128, 64  # of a block


def fits(stream_TxNxD, gain_NxD, w_in_NxDxI, w_up_NxRxD, dtype) -> bool:
    """Whether the weights, their gradients and a block's streams fit in a chip's memory, at a width of whole lanes."""
    n, d = gain_NxD.shape
    i, r = w_in_NxDxI.shape[2], w_up_NxRxD.shape[1]
    weights = n * d * (i + r)
    block = BACKWARD_TOKENS * n * d
    needed = weights * (jnp.dtype(dtype).itemsize + 4) + block * (4 * stream_TxNxD.dtype.itemsize + 4)
    return d % 128 == 0 and needed < VMEM


def forward(stream_TxNxD, gain_NxD, w_in_NxDxI, w_up_NxRxD, *, eps, reach, dtype, interpret=False):
    """(x [T, D] in `dtype`, the projections [T, I] in float32) of the streams."""
    stream_NxTxD = jnp.moveaxis(stream_TxNxD, 1, 0)
    n, t, d = stream_NxTxD.shape
    i, r = w_in_NxDxI.shape[2], w_up_NxRxD.shape[1]
    block = min(FORWARD_TOKENS, t)

    def kernel(stream_ref, gain_ref, w_in_ref, w_up_ref, x_ref, out_ref):
        normed, out_TxI = [], jnp.zeros((block, i), F32)
        for k in range(n):
            normed_TxD = _normed(stream_ref[k], gain_ref[k], eps)[0]
            normed.append(normed_TxD)
            out_TxI += dot(normed_TxD, w_in_ref[k], 1, 0, dtype)
        z_TxR = _silu(out_TxI[:, :r] / n)
        x_TxD = jnp.zeros((block, d), F32)
        for k in range(n):
            x_TxD += _half_plus_half_tanh(z_TxR, w_up_ref[k], dtype)[0] * normed[k]
        x_ref[...] = (reach / n * x_TxD).astype(dtype)
        out_ref[...] = out_TxI

    tokens = by_tokens(block)
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(t, block),),
        in_specs=[tokens(n, d), whole((n, d)), whole((n, d, i)), whole((n, r, d))],
        out_specs=[tokens(None, d), tokens(None, i)],
        out_shape=[jax.ShapeDtypeStruct((t, d), dtype), jax.ShapeDtypeStruct((t, i), F32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM),
        cost_estimate=_cost(t, n, d, i, r, stream_NxTxD.dtype, passes=1),
        interpret=interpret,
    )(stream_NxTxD, gain_NxD, w_in_NxDxI, w_up_NxRxD)


def backward(
    stream_TxNxD, gain_NxD, w_in_NxDxI, w_up_NxRxD, a_TxR, dx_TxD, dmore_TxM, *, eps, reach, dtype, interpret=False
):
    """The gradients of the streams, the gain, W_in and W_up, the last three in float32.

    Those of the weights are summed over the blocks in the chip's memory and leave it once.
    """
    stream_NxTxD = jnp.moveaxis(stream_TxNxD, 1, 0)
    n, t, d = stream_NxTxD.shape
    i, r, m = w_in_NxDxI.shape[2], a_TxR.shape[1], dmore_TxM.shape[1]
    block = min(BACKWARD_TOKENS, t)
    blocks = pl.cdiv(t, block)
    more = [dmore_TxM] if m else []  # the read before the LM head has no further projections

    def kernel(stream_ref, gain_ref, w_in_ref, w_up_ref, a_ref, dx_ref, *refs):
        *dmore_refs, dstream_ref = refs[: len(more) + 1]
        *results, dgain_ref, dw_in_ref, dw_up_ref = refs[len(more) + 1 :]

        @pl.when(pl.program_id(0) == 0)
        def _():
            for ref in (dgain_ref, dw_in_ref, dw_up_ref):
                ref[...] = jnp.zeros_like(ref)

        def tokens(x):  # the last block may reach beyond them
            if t % block == 0:
                return x.astype(F32)
            row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) + pl.program_id(0) * block
            return jnp.where(row < t, x.astype(F32), 0.0)

        a_TxR, dx_TxD = tokens(a_ref[...]) / n, reach / n * tokens(dx_ref[...])
        z_TxR, dz_TxR, gates = _silu(a_TxR), jnp.zeros((block, r), F32), []
        for k in range(n):
            normed_TxD = _normed(tokens(stream_ref[k]), gain_ref[k], eps)[0]
            gate_TxD, t_TxD = _half_plus_half_tanh(z_TxR, w_up_ref[k], dtype)
            gates.append(gate_TxD)
            dlogit_TxD = 0.25 * dx_TxD * normed_TxD * (1 - t_TxD * t_TxD)
            dw_up_ref[k] += dot(z_TxR, dlogit_TxD, 0, 0, dtype)
            dz_TxR += dot(dlogit_TxD, w_up_ref[k], 1, 1, dtype)
        sigma_TxR = 0.5 + 0.5 * jnp.tanh(0.5 * a_TxR)
        da_TxR = dz_TxR * sigma_TxR * (1 + a_TxR * (1 - sigma_TxR)) / n
        dout_TxI = jnp.concatenate([da_TxR, *(tokens(ref[...]) for ref in dmore_refs)], axis=1)
        for k in range(n):
            normed_TxD, unit_TxD, scale_Tx1 = _normed(tokens(stream_ref[k]), gain_ref[k], eps)
            dw_in_ref[k] += dot(dout_TxI, normed_TxD, 0, 0, dtype)
            dnormed_TxD = dx_TxD * gates[k] + dot(dout_TxI, w_in_ref[k], 1, 1, dtype)
            dgain_ref[k, :] += jnp.sum(dnormed_TxD * unit_TxD, axis=0)
            along_Tx1 = jnp.mean(dnormed_TxD * normed_TxD, axis=-1, keepdims=True)
            dstream_TxD = scale_Tx1 * (dnormed_TxD * (1 + gain_ref[k]) - along_Tx1 * unit_TxD)
            dstream_ref[k] = dstream_TxD.astype(dstream_ref.dtype)

        @pl.when(pl.program_id(0) == blocks - 1)
        def _():
            for ref, result in zip((dgain_ref, dw_in_ref, dw_up_ref), results, strict=True):
                pltpu.sync_copy(ref, result)

    of_weights = [(n, d), (n, i, d), (n, r, d)]
    tokens = by_tokens(block)
    dstream_NxTxD, dgain_NxD, dw_in_NxIxD, dw_up_NxRxD = pl.pallas_call(
        kernel,
        grid=(blocks,),
        in_specs=[
            *(tokens(n, d), whole((n, d)), whole((n, d, i)), whole((n, r, d))),
            *(tokens(None, r), tokens(None, d), *(tokens(None, m) for _ in more)),
        ],
        out_specs=[tokens(n, d), *(pl.BlockSpec(memory_space=pl.ANY) for _ in of_weights)],
        out_shape=[
            jax.ShapeDtypeStruct((n, t, d), stream_NxTxD.dtype),
            *(jax.ShapeDtypeStruct(shape, F32) for shape in of_weights),
        ],
        scratch_shapes=[pltpu.VMEM(shape, F32) for shape in of_weights],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM),
        cost_estimate=_cost(t, n, d, i, r, stream_NxTxD.dtype, passes=3),
        interpret=interpret,
    )(stream_NxTxD, gain_NxD, w_in_NxDxI, w_up_NxRxD, a_TxR, dx_TxD, *more)
    return jnp.moveaxis(dstream_NxTxD, 0, 1), dgain_NxD, jnp.swapaxes(dw_in_NxIxD, 1, 2), dw_up_NxRxD


def _normed(stream_TxD, gain_D, eps):
    """(R̂, RMSNorm(R), its scale) of one stream in float32."""
    stream_TxD = stream_TxD.astype(F32)
    scale_Tx1 = jax.lax.rsqrt(jnp.mean(jnp.square(stream_TxD), axis=-1, keepdims=True) + eps)
    unit_TxD = stream_TxD * scale_Tx1
    return unit_TxD * (1 + gain_D), unit_TxD, scale_Tx1


def _silu(x):
    return x * (0.5 + 0.5 * jnp.tanh(0.5 * x))


def _half_plus_half_tanh(z_TxR, w_up_RxD, dtype):
    """(σ(z W_up), tanh(z W_up / 2))."""
    t_TxD = jnp.tanh(dot(0.5 * z_TxR, w_up_RxD, 1, 0, dtype))
    return 0.5 + 0.5 * t_TxD, t_TxD


def _cost(t, n, d, i, r, stream_dtype, passes):
    streams = t * n * d * stream_dtype.itemsize * passes
    return pl.CostEstimate(
        flops=2 * t * n * d * (i + r) * passes, transcendentals=t * n * d * passes, bytes_accessed=streams
    )
