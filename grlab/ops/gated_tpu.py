"""The read of Gated Residuals, alone or with the write before it, and its derivative: a pass over the streams each.

For TPUs (Pallas, Mosaic). The arithmetic is that of grlab/ops/gated.py, in the same types; the names of dimensions are
its, too. A block is some tokens of all streams at their full width; the weights stay on the chip.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from grlab.ops.tpu import F32, by_tokens, dot, vmem, whole

FORWARD_TOKENS, BACKWARD_TOKENS = 128, 64  # of a block


def fits(stream_TxNxD, gain_NxD, w_in_NxDxI, w_up_NxRxD, dtype) -> bool:
    """Whether the weights, their gradients and a block's streams fit in a chip's memory, at a width of whole lanes."""
    n, d = gain_NxD.shape
    i, r = w_in_NxDxI.shape[2], w_up_NxRxD.shape[1]
    weights = n * d * (i + r)
    block = BACKWARD_TOKENS * n * d
    needed = weights * (jnp.dtype(dtype).itemsize + 4) + block * (6 * stream_TxNxD.dtype.itemsize + 4)
    return d % 128 == 0 and needed < vmem()


def forward(stream_TxNxD, gain_NxD, w_in_NxDxI, w_up_NxRxD, *written, eps, reach, dtype, interpret=False):
    """x [T, D] in `dtype` and the projections [T, R] and [T, M] in float32; before them R', with s and y given."""
    stream_NxTxD = jnp.moveaxis(stream_TxNxD, 1, 0)
    n, t, d = stream_NxTxD.shape
    i, r = w_in_NxDxI.shape[2], w_up_NxRxD.shape[1]
    block = min(FORWARD_TOKENS, t)
    projections = [r, i - r] if i > r else [r]  # the read before the LM head has no further ones

    def of_stream(k):
        return slice(k * d, (k + 1) * d)

    def kernel(stream_ref, gain_ref, w_in_ref, w_up_ref, *refs):
        written_refs, (x_ref, a_ref, *more_refs) = refs[: -1 - len(projections)], refs[-1 - len(projections) :]
        normed, out_TxI = [], jnp.zeros((block, i), F32)
        for k in range(n):
            stream_TxD = stream_ref[k]
            if written:
                s_ref, y_ref, new_ref = written_refs
                new_TxD = stream_TxD.astype(F32) + s_ref[:, k : k + 1] * y_ref[...].astype(F32)
                stream_TxD = new_ref[k] = new_TxD.astype(new_ref.dtype)
            normed_TxD = _normed(stream_TxD, gain_ref[k], eps)[0]
            normed.append(normed_TxD)
            out_TxI += dot(normed_TxD, w_in_ref[k], 1, 0, dtype)
        z_TxR = _silu(out_TxI[:, :r] / n)
        x_TxD = jnp.zeros((block, d), F32)
        for k in range(n):
            x_TxD += _half_plus_half_tanh(z_TxR, w_up_ref[:, of_stream(k)], dtype)[0] * normed[k]
        x_ref[...] = (reach / n * x_TxD).astype(dtype)
        a_ref[...] = out_TxI[:, :r]
        for more_ref in more_refs:
            more_ref[...] = out_TxI[:, r:]

    tokens = by_tokens(block)
    found = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(t, block),),
        in_specs=[
            *(tokens(n, d), whole((n, d)), whole((n, d, i)), whole((r, n * d))),
            *(tokens(None, x.shape[1]) for x in written),
        ],
        out_specs=[*([tokens(n, d)] if written else []), tokens(None, d), *(tokens(None, p) for p in projections)],
        out_shape=[
            *([jax.ShapeDtypeStruct(stream_NxTxD.shape, stream_NxTxD.dtype)] if written else []),
            jax.ShapeDtypeStruct((t, d), dtype),
            *(jax.ShapeDtypeStruct((t, p), F32) for p in projections),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem()),
        cost_estimate=_cost(t, n, d, i, r, stream_NxTxD.dtype, passes=1),
        interpret=interpret,
    )(stream_NxTxD, gain_NxD, w_in_NxDxI, _by_rank(w_up_NxRxD), *written)
    new, found = ([jnp.moveaxis(found[0], 0, 1)], found[1:]) if written else ([], found)
    return *new, *found, *([jnp.zeros((t, 0), F32)] if i == r else [])


def backward(
    stream_TxNxD,
    gain_NxD,
    w_in_NxDxI,
    w_up_NxRxD,
    a_TxR,
    dx_TxD,
    dmore_TxM,
    *written,
    eps,
    reach,
    dtype,
    interpret=False,
):
    """The gradients of the streams, and in float32 of the gain, W_in and W_up; after a write those of s and y.

    `written` is the cotangent of R', s and y, or nothing. The gradients of the weights are summed over the blocks in
    the chip's memory and leave it once.
    """
    stream_NxTxD = jnp.moveaxis(stream_TxNxD, 1, 0)
    n, t, d = stream_NxTxD.shape
    i, r, m = w_in_NxDxI.shape[2], a_TxR.shape[1], dmore_TxM.shape[1]
    block = min(BACKWARD_TOKENS, t)
    blocks = pl.cdiv(t, block)
    more = [dmore_TxM] if m else []
    if written:
        dnew_TxNxD, s_TxN, y_TxD = written
        written = (jnp.moveaxis(dnew_TxNxD, 1, 0), s_TxN, y_TxD)

    def of_stream(k):
        return slice(k * d, (k + 1) * d)

    def kernel(stream_ref, gain_ref, w_in_ref, w_up_ref, a_ref, dx_ref, *refs):
        refs = list(refs)
        dmore_refs = [refs.pop(0) for _ in more]
        written_refs = [refs.pop(0) for _ in written]
        dstream_ref, *results = [refs.pop(0) for _ in range(4)]
        dwritten_refs = [refs.pop(0) for _ in written[1:]]
        dgain_ref, dw_in_ref, dw_up_ref = refs

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
            gate_TxD, t_TxD = _half_plus_half_tanh(z_TxR, w_up_ref[:, of_stream(k)], dtype)
            gates.append(gate_TxD)
            dlogit_TxD = 0.25 * dx_TxD * normed_TxD * (1 - t_TxD * t_TxD)
            dw_up_ref[:, of_stream(k)] += dot(z_TxR, dlogit_TxD, 0, 0, dtype)
            dz_TxR += dot(dlogit_TxD, w_up_ref[:, of_stream(k)], 1, 1, dtype)
        sigma_TxR = 0.5 + 0.5 * jnp.tanh(0.5 * a_TxR)
        da_TxR = dz_TxR * sigma_TxR * (1 + a_TxR * (1 - sigma_TxR)) / n
        dout_TxI = jnp.concatenate([da_TxR, *(tokens(ref[...]) for ref in dmore_refs)], axis=1)
        dy_TxD = jnp.zeros((block, d), F32)
        for k in range(n):
            normed_TxD, unit_TxD, scale_Tx1 = _normed(tokens(stream_ref[k]), gain_ref[k], eps)
            dw_in_ref[k] += dot(dout_TxI, normed_TxD, 0, 0, dtype)
            dnormed_TxD = dx_TxD * gates[k] + dot(dout_TxI, w_in_ref[k], 1, 1, dtype)
            dgain_ref[k, :] += jnp.sum(dnormed_TxD * unit_TxD, axis=0)
            along_Tx1 = jnp.mean(dnormed_TxD * normed_TxD, axis=-1, keepdims=True)
            dstream_TxD = scale_Tx1 * (dnormed_TxD * (1 + gain_ref[k]) - along_Tx1 * unit_TxD)
            if written:
                dnew_ref, s_ref, y_ref = written_refs
                dstream_TxD += dnew_ref[k].astype(F32)
                ds_TxD = dstream_TxD * y_ref[...].astype(F32)
                dwritten_refs[0][:, k : k + 1] = jnp.sum(ds_TxD, axis=-1, keepdims=True)
                dy_TxD += s_ref[:, k : k + 1] * dstream_TxD
            dstream_ref[k] = dstream_TxD.astype(dstream_ref.dtype)
        if written:
            dwritten_refs[1][...] = dy_TxD.astype(dwritten_refs[1].dtype)

        @pl.when(pl.program_id(0) == blocks - 1)
        def _():
            for ref, result in zip((dgain_ref, dw_in_ref, dw_up_ref), results, strict=True):
                pltpu.sync_copy(ref, result)

    of_weights = [(n, d), (n, i, d), (r, n * d)]
    tokens = by_tokens(block)
    of_written = [tokens(None, n), tokens(None, d)] if written else []
    dstream_NxTxD, dgain_NxD, dw_in_NxIxD, dw_up_RxND, *dwritten = pl.pallas_call(
        kernel,
        grid=(blocks,),
        in_specs=[
            *(tokens(n, d), whole((n, d)), whole((n, d, i)), whole((r, n * d))),
            *(tokens(None, r), tokens(None, d), *(tokens(None, m) for _ in more)),
            *([tokens(n, d), *of_written] if written else []),
        ],
        out_specs=[tokens(n, d), *(pl.BlockSpec(memory_space=pl.ANY) for _ in of_weights), *of_written],
        out_shape=[
            jax.ShapeDtypeStruct((n, t, d), stream_NxTxD.dtype),
            *(jax.ShapeDtypeStruct(shape, F32) for shape in of_weights),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written[1:]),
        ],
        scratch_shapes=[pltpu.VMEM(shape, F32) for shape in of_weights],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem()),
        cost_estimate=_cost(t, n, d, i, r, stream_NxTxD.dtype, passes=3),
        interpret=interpret,
    )(stream_NxTxD, gain_NxD, w_in_NxDxI, _by_rank(w_up_NxRxD), a_TxR, dx_TxD, *more, *written)
    dstream_TxNxD = jnp.moveaxis(dstream_NxTxD, 0, 1)
    dw_up_NxRxD = jnp.moveaxis(dw_up_RxND.reshape(r, n, d), 1, 0)
    return dstream_TxNxD, dgain_NxD, jnp.swapaxes(dw_in_NxIxD, 1, 2), dw_up_NxRxD, *dwritten


def _by_rank(w_up_NxRxD):
    """[R, N·D], as the parameter is: XLA takes two transpositions for none."""
    n, r, d = w_up_NxRxD.shape
    return jnp.moveaxis(w_up_NxRxD, 0, 1).reshape(r, n * d)


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
