"""The read of mHC and its derivative as one pass over the streams each, for TPUs (Pallas, Mosaic).

The arithmetic is that of grlab/ops/manifold.py, in float32; the names of dimensions are its, too. What is small, the O
logits of a token and all that comes of them, has the tokens along the lanes, so that Sinkhorn-Knopp is of full vectors.

Bytes a token, each block being read or written once, at N = 4 (O = 24), D = 2560 and all in bfloat16:

    forward    R in; x, H_post, H_res, the projections and their scale out:       2ND + 2D + 180 = 25,780
    derivative R, dx, dH_post, dH_res, the projections and their scale in; dR out: 4ND + 2D + 180 = 46,260

The weights, phi in parts and its gradient, are at most 20ND·O bytes more, of a call and not of a token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from grlab.ops import sinkhorn_tpu
from grlab.ops.tpu import F32, LANES, block_of, by_lanes, by_tokens, columns, dot, for_rows, put_column, vmem, whole

_MOST_TOKENS = 512  # of a block: the more, the less do the iterations of Sinkhorn-Knopp wait for each other


class Settings(NamedTuple):
    """What is not learned of a read."""

    eps: float  # of the norm before the projections
    norm_eps: float  # of the norm of what is read
    iterations: int  # of Sinkhorn-Knopp
    v4_eps: float | None  # of DeepSeek-V4's form; None: the paper's
    dtype: jnp.dtype  # of x


def fits(t: int, n: int, d: int, dtype) -> bool:
    """Whether there is a block of tokens, and the weights and its streams fit in a chip's memory.

    Of an even N the N (N + 2) logits are whole sublanes.
    """
    whole_vectors = t >= LANES and d % LANES == 0 and n % 2 == 0 and jnp.dtype(dtype) in (F32, jnp.bfloat16)
    return whole_vectors and LANES * _bytes_a_token(n, d, dtype, passes=2) <= _room(n, d)


def forward(stream_TxNxD, phi_IxO, alpha_O, b_O, gain_D, settings: Settings, *, interpret=False):
    """(x [T, D], H_post [N, T], H_res [N², T], the projections [O, T], their scale [1, T]); all but x in float32."""
    stream_NxTxD = jnp.moveaxis(stream_TxNxD, 1, 0)
    n, t, d = stream_NxTxD.shape
    o = len(b_O)
    phi_NxPxD = _left(_of_streams(phi_IxO, n), stream_TxNxD.dtype, axis=1)
    block = block_of(t, _MOST_TOKENS, _bytes_a_token(n, d, stream_TxNxD.dtype, passes=1), _room(n, d))

    def kernel(stream_ref, phi_ref, alpha_ref, b_ref, gain_ref, *refs):
        x_ref, post_ref, res_ref, out_ref, scale_ref, square_Tx1, pre_TxN = refs

        def squares(rows):
            values = [[stream_ref[k, rows, at].astype(F32) for k in range(n)] for at in columns(d)]
            square_Tx1[rows] = sum(_sum(sum(x_TxC * x_TxC for x_TxC in of_streams)) for of_streams in values)

        for_rows(block, squares)
        products_PxT = sum(dot(phi_ref[k], stream_ref[k], 1, 1, phi_ref.dtype) for k in range(n))
        scale_1xT = jax.lax.rsqrt(square_Tx1[...].T / (n * d) + settings.eps)
        out_OxT = scale_1xT * _joined(products_PxT, o)
        scale_ref[...], out_ref[...] = scale_1xT, out_OxT
        sigma_NxT, post_ref[...], res = _maps(alpha_ref[...] * out_OxT + b_ref[...], n)
        h_res = sinkhorn_tpu.project(res, settings.iterations, settings.v4_eps)
        res_ref[...] = jnp.concatenate(h_res, axis=0)
        pre_TxN[...] = (sigma_NxT + (settings.v4_eps or 0.0)).T

        def read(rows):
            u, scale_Tx1 = _read(lambda k, at: stream_ref[k, rows, at].astype(F32), pre_TxN[rows], d, settings.norm_eps)
            for at, u_TxC in zip(columns(d), u, strict=True):
                x_ref[rows, at] = (u_TxC * scale_Tx1 * (1 + gain_ref[:, at])).astype(x_ref.dtype)

        for_rows(block, read)

    tokens, lanes = by_tokens(block), by_lanes(block)
    rows = (n, n * n, o, 1)
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(t, block),),
        in_specs=[tokens(n, d), *map(whole, (phi_NxPxD.shape, (o, 1), (o, 1), (1, d)))],
        out_specs=[tokens(None, d), *map(lanes, rows)],
        out_shape=[
            jax.ShapeDtypeStruct((t, d), settings.dtype),
            *(jax.ShapeDtypeStruct((size, t), F32) for size in rows),
        ],
        scratch_shapes=[pltpu.VMEM((block, 1), F32), pltpu.VMEM((block, n), F32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=vmem()),
        cost_estimate=_cost(stream_TxNxD, o, passes=1),
        interpret=interpret,
    )(stream_NxTxD, phi_NxPxD, alpha_O[:, None], b_O[:, None], gain_D[None])


def backward(
    stream_TxNxD, phi_IxO, alpha_O, b_O, gain_D, out_OxT, scale_1xT, dx_TxD, dpost_NxT, dres_PxT,
    settings: Settings, *, interpret=False,
):  # fmt: skip
    """The gradients of the first five, the last four in float32.

    Those of the weights are summed over the blocks in the chip's memory and leave it once: once for each of the two
    cores that a chip may have, which share the blocks.
    """
    stream_NxTxD = jnp.moveaxis(stream_TxNxD, 1, 0)
    n, t, d = stream_NxTxD.shape
    o, dtype = len(b_O), stream_TxNxD.dtype
    phi_NxPxD = _right_of_two(_of_streams(phi_IxO, n), dtype, axis=1)
    block = block_of(t, _MOST_TOKENS, _bytes_a_token(n, d, dtype, passes=2), _room(n, d))
    blocks = pl.cdiv(t, block)
    cores = 2 if blocks % 2 == 0 else 1
    steps = blocks // cores

    def step(core, k):
        return core * steps + k

    def kernel(stream_ref, phi_ref, alpha_ref, b_ref, gain_ref, out_ref, scale_ref, dx_ref, dpost_ref, dres_ref, *refs):
        dstream_ref, *of_weights = refs[:5]
        dphi_ref, dalpha_ref, db_ref, dgain_ref = of_weights
        pre_TxN, dpre_TxN, along_Tx1, du_TxD, product_TxD, kept_ref = refs[5:]
        start = step(pl.program_id(0), pl.program_id(1)) * block

        @pl.when(pl.program_id(1) == 0)
        def _():
            for ref in of_weights:
                ref[...] = jnp.zeros_like(ref)

        def tokens(x, axis=0, first=0):  # the last block may reach beyond them
            if t % block == 0:
                return x
            token = start + first + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
            return jnp.where(token < t, x, jnp.zeros_like(x))

        def stream(k, rows, at):
            return tokens(stream_ref[k, rows, at].astype(F32), first=rows.start)

        out_OxT, scale_1xT = tokens(out_ref[...], axis=1), tokens(scale_ref[...], axis=1)
        sigma_NxT, post_NxT, res = _maps(alpha_ref[...] * out_OxT + b_ref[...], n)
        pre_TxN[...] = (sigma_NxT + (settings.v4_eps or 0.0)).T

        def read(rows):
            u, scale_Tx1 = _read(lambda k, at: stream(k, rows, at), pre_TxN[rows], d, settings.norm_eps)
            dunit, along = [], 0.0
            for at, u_TxC in zip(columns(d), u, strict=True):
                dx_TxC = tokens(dx_ref[rows, at].astype(F32), first=rows.start)
                dgain_ref[:, at] += jnp.sum(dx_TxC * (u_TxC * scale_Tx1), axis=0, keepdims=True)
                dunit.append(dx_TxC * (1 + gain_ref[:, at]))
                along += _sum(dunit[-1] * u_TxC)
            along *= scale_Tx1 * scale_Tx1 / d
            dpre = [0.0] * n
            for at, u_TxC, dunit_TxC in zip(columns(d), u, dunit, strict=True):
                du_TxC = scale_Tx1 * (dunit_TxC - along * u_TxC)
                du_TxD[rows, at] = du_TxC
                dpre = [dpre[k] + _sum(du_TxC * stream(k, rows, at)) for k in range(n)]
            columns_TxN = jnp.zeros((rows.size, n), F32)
            for k in range(n):
                columns_TxN = put_column(columns_TxN, k, dpre[k])
            dpre_TxN[rows] = columns_TxN

        for_rows(block, read)
        dpre_NxT = dpre_TxN[...].T * sigma_NxT * (1 - sigma_NxT)
        dpost_NxT = tokens(dpost_ref[...], axis=1) * post_NxT * (1 - post_NxT / 2)
        dres_PxT = tokens(dres_ref[...], axis=1)
        dres = [dres_PxT[i * n : i * n + n] for i in range(n)]
        dres = sinkhorn_tpu.gradient(res, settings.iterations, settings.v4_eps, dres, kept_ref)
        dlogits_OxT = jnp.concatenate([dpre_NxT, dpost_NxT, *dres], axis=0)
        dalpha_ref[...] += _sum(dlogits_OxT * out_OxT)
        db_ref[...] += _sum(dlogits_OxT)
        dout_OxT = alpha_ref[...] * dlogits_OxT
        along_1xT = jnp.sum(dout_OxT * out_OxT, axis=0, keepdims=True) / (n * d)
        along_Tx1[...] = (scale_1xT * scale_1xT * along_1xT).T
        dout_OxT = scale_1xT * dout_OxT
        dout_of_dphi, dout_of_dstream = _left(dout_OxT, dtype, axis=0), _left_of_two(dout_OxT, dtype, axis=0)
        for k in range(n):
            dphi_ref[k] += _joined(dot(dout_of_dphi, tokens(stream_ref[k]), 1, 0, dtype), o)
            product_TxD[...] = dot(dout_of_dstream, phi_ref[k], 0, 0, dtype)

            def of_stream(rows):
                pre_Tx1, along = pre_TxN[rows][:, k : k + 1], along_Tx1[rows]
                for at in columns(d):
                    dstream_TxC = pre_Tx1 * du_TxD[rows, at] + product_TxD[rows, at] - along * stream(k, rows, at)
                    dstream_ref[k, rows, at] = dstream_TxC.astype(dstream_ref.dtype)

            for_rows(block, of_stream)

    tokens, lanes = by_tokens(block, step), by_lanes(block, step)
    of_weights = [(n, o, d), (o, 1), (o, 1), (1, d)]
    dstream_NxTxD, dphi_NxOxD, dalpha_Ox1, db_Ox1, dgain_1xD = pl.pallas_call(
        kernel,
        grid=(cores, steps),
        in_specs=[
            *(tokens(n, d), *map(whole, (phi_NxPxD.shape, (o, 1), (o, 1), (1, d)))),
            *(lanes(o), lanes(1), tokens(None, d), lanes(n), lanes(n * n)),
        ],
        out_specs=[tokens(n, d), *map(_of_a_core, of_weights)],
        out_shape=[
            jax.ShapeDtypeStruct((n, t, d), dtype),
            *(jax.ShapeDtypeStruct((cores, *shape), F32) for shape in of_weights),
        ],
        scratch_shapes=[
            *(pltpu.VMEM((block, size), F32) for size in (n, n, 1, d, d)),
            sinkhorn_tpu.kept(settings.iterations, n, block),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem()),
        cost_estimate=_cost(stream_TxNxD, o, passes=2),
        interpret=interpret,
    )(
        *(stream_NxTxD, phi_NxPxD, alpha_O[:, None], b_O[:, None], gain_D[None]),
        *(out_OxT, scale_1xT, dx_TxD, dpost_NxT, dres_PxT),
    )
    dphi_IxO = jnp.swapaxes(jnp.sum(dphi_NxOxD, axis=0), 1, 2).reshape(n * d, o)
    dalpha_O, db_O = (jnp.sum(x_Ox1, axis=0)[:, 0] for x_Ox1 in (dalpha_Ox1, db_Ox1))
    return jnp.moveaxis(dstream_NxTxD, 0, 1), dphi_IxO, dalpha_O, db_O, jnp.sum(dgain_1xD, axis=0)[0]


def _maps(logits_OxT, n):
    """(H_pre without an epsilon, H_post, the rows of the logits of H_res)."""
    res = [logits_OxT[(2 + i) * n : (3 + i) * n] for i in range(n)]
    return jax.nn.sigmoid(logits_OxT[:n]), 2 * jax.nn.sigmoid(logits_OxT[n : 2 * n]), res


def _read(stream, pre_TxN, d, eps):
    """(u = Σ_k H_pre,k R_k by its columns, the scale [T, 1] of its norm) for R_k, these columns, as stream(k, at)."""
    pre = [pre_TxN[:, k : k + 1] for k in range(pre_TxN.shape[1])]
    u = [sum(pre_Tx1 * stream(k, at) for k, pre_Tx1 in enumerate(pre)) for at in columns(d)]
    return u, jax.lax.rsqrt(sum(_sum(u_TxC * u_TxC) for u_TxC in u) / d + eps)


def _sum(x):
    return jnp.sum(x, axis=1, keepdims=True)


def _of_streams(phi_IxO, n):
    """phi as [N, O, D]."""
    return jnp.swapaxes(phi_IxO.reshape(n, -1, phi_IxO.shape[1]), 1, 2)


# A product with streams in bfloat16 is exact where the other factor is given as three parts in bfloat16 that sum to it:
# one product with the parts beside each other, in place of the six that float32 takes, each of few rows or columns
# where the unit has 128. The product of two factors in float32 is one over six times the axis: of pairs of parts, those
# that are left out are below the last bit.


def _left(x, dtype, axis):
    """What a factor in float32 becomes beside streams in `dtype`."""
    return _beside(x, dtype, (0, 1, 2), axis)


def _left_of_two(x, dtype, axis):
    """What the first of two factors in float32 becomes."""
    return _beside(x, dtype, (0, 0, 0, 1, 1, 2), axis)


def _right_of_two(x, dtype, axis):
    """What the second becomes."""
    return _beside(x, dtype, (0, 1, 2, 0, 1, 0), axis)


def _beside(x, dtype, which, axis):
    if dtype == F32:
        return x
    parts = _parts(x)
    return jnp.concatenate([parts[k] for k in which], axis)


def _joined(products_PxT, o):
    """The sum of the products with the parts."""
    return sum(products_PxT[k : k + o] for k in range(0, len(products_PxT), o))


def _parts(x):
    """Three arrays in bfloat16, of eight bits of x each; cut off and not rounded, which a compiler could undo."""
    parts = []
    for _ in range(3):
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & -(2**16)
        part = jax.lax.bitcast_convert_type(bits, F32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts


def _of_a_core(shape):
    return pl.BlockSpec((None, *shape), lambda core, k: (core, *(0 for _ in shape)))


def _bytes_a_token(n, d, dtype, passes):
    """Of a block on the chip: streams in so many directions and x or its gradient, twice each, and float32 of a width.

    What has a vector for each token counts, too, as does the product with a stream before it is stored.
    """
    return 2 * (passes * n * d + d) * jnp.dtype(dtype).itemsize + 4 * ((2 * passes - 1) * d + 4 * LANES)


def _room(n, d):
    """Bytes of the chip's memory that the weights leave: phi, in six parts or in float32, and its gradient twice."""
    return vmem() - 20 * n * d * n * (n + 2)


def _cost(stream_TxNxD, o, passes):
    t, n, d = stream_TxNxD.shape
    flops = 2 * t * n * d * (2 * passes - 1) * (o + 2)
    return pl.CostEstimate(flops=flops, transcendentals=t * n * n, bytes_accessed=passes * stream_TxNxD.nbytes)
