"""The write H R + s ⊗ y of wide streams and its derivative as one pass over the streams each, for TPUs.

The arithmetic is that of `grlab/ops/streams.py`, in float32 and rounded once. Dimensions: T all tokens, N streams, D
width, G gates of a token: N² of H row by row, or none where H is the identity, then N of s. Gates lie in HBM with the
tokens along the lanes, where they take 4 G bytes a token, and are turned round on the chip.

Bytes a token, each block being read or written once, at N = 4, D = 2560 in bfloat16:

    forward    R and y in, R' out:              2 · 2ND + 2D + 4G = 46,160 (of gates 80)
    derivative R, y and dR' in, dR and dy out:  3 · 2ND + 4D + 8G = 71,840 (of gates 160)
    without H  y and dR' in, dy out:            2ND + 4D + 8G = 30,752 (of gates 32)
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from grlab.ops.tpu import F32, LANES, block_of, by_lanes, by_tokens, columns, for_rows, put_column, vmem

_MOST_TOKENS = 512  # of a block


def fits(t: int, n: int, d: int, dtype) -> bool:
    """Whether there is a block of tokens, its streams fit in a chip's memory, and all gates of a token in a vector."""
    fit = n * (n + 1) <= LANES and LANES * _bytes_a_token(n, d, dtype, passes=3) <= vmem()
    return fit and t >= LANES and d % LANES == 0


def forward(stream_TxNxD, gates_TxG, y_TxD, *, interpret=False):
    """The new streams [T, N, D]."""
    stream_NxTxD = jnp.moveaxis(stream_TxNxD, 1, 0)
    n, t, d = stream_NxTxD.shape
    block = block_of(t, _MOST_TOKENS, _bytes_a_token(n, d, stream_TxNxD.dtype, passes=2), vmem())

    def kernel(stream_ref, gates_ref, y_ref, new_ref, gates_TxG):
        gates_TxG[...] = gates_ref[...].T

        def some(rows):
            h, s = _gates(gates_TxG[rows], n)
            for at in columns(d):
                stream = [stream_ref[j, rows, at].astype(F32) for j in range(n)]
                y = y_ref[rows, at].astype(F32)
                for i in range(n):
                    kept = _sum(h[i], stream) if h else stream[i]
                    new_ref[i, rows, at] = (kept + s[i] * y).astype(new_ref.dtype)

        for_rows(block, some)

    tokens, lanes = by_tokens(block), by_lanes(block)
    new_NxTxD = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(t, block),),
        in_specs=[tokens(n, d), lanes(gates_TxG.shape[1]), tokens(None, d)],
        out_specs=tokens(n, d),
        out_shape=jax.ShapeDtypeStruct((n, t, d), stream_TxNxD.dtype),
        scratch_shapes=[pltpu.VMEM((block, gates_TxG.shape[1]), F32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=vmem()),
        cost_estimate=_cost(stream_TxNxD, y_TxD, passes=2, products=1),
        interpret=interpret,
    )(stream_NxTxD, gates_TxG.T, y_TxD)
    return jnp.moveaxis(new_NxTxD, 0, 1)


def backward(stream_TxNxD, gates_TxG, y_TxD, dnew_TxNxD, *, interpret=False):
    """The gradients of the streams, the gates (float32) and y, of that of the new streams.

    Without H the first is the cotangent itself.
    """
    stream_NxTxD, dnew_NxTxD = jnp.moveaxis(stream_TxNxD, 1, 0), jnp.moveaxis(dnew_TxNxD, 1, 0)
    n, t, d = stream_NxTxD.shape
    g = gates_TxG.shape[1]
    mixes = g > n
    block = block_of(t, _MOST_TOKENS, _bytes_a_token(n, d, stream_TxNxD.dtype, passes=3), vmem())

    def kernel(gates_ref, y_ref, dnew_ref, *refs):
        *of_streams, dgates_ref, dy_ref, gates_TxG, dgates_TxG = refs
        gates_TxG[...] = gates_ref[...].T

        def some(rows):
            h, s = _gates(gates_TxG[rows], n)
            dgates = [0.0] * g
            for at in columns(d):
                dnew = [dnew_ref[i, rows, at].astype(F32) for i in range(n)]
                dy_ref[rows, at] = _sum(s, dnew).astype(dy_ref.dtype)
                products = []
                if mixes:
                    stream_ref, dstream_ref = of_streams
                    factors = [stream_ref[j, rows, at].astype(F32) for j in range(n)]
                    for j in range(n):
                        dstream_ref[j, rows, at] = _sum([h[i][j] for i in range(n)], dnew).astype(dstream_ref.dtype)
                    products += [dnew[i] * factors[j] for i in range(n) for j in range(n)]
                y = y_ref[rows, at].astype(F32)
                products += [dnew[i] * y for i in range(n)]
                dgates = [a + jnp.sum(p, axis=1, keepdims=True) for a, p in zip(dgates, products, strict=True)]
            columns_TxG = jnp.zeros((rows.size, g), F32)
            for k, dgate_Tx1 in enumerate(dgates):
                columns_TxG = put_column(columns_TxG, k, dgate_Tx1)
            dgates_TxG[rows] = columns_TxG

        for_rows(block, some)
        dgates_ref[...] = dgates_TxG[...].T

    tokens, lanes = by_tokens(block), by_lanes(block)
    of_streams = [tokens(n, d)] if mixes else []
    *dstream, dgates_GxT, dy_TxD = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(t, block),),
        in_specs=[lanes(g), tokens(None, d), tokens(n, d), *of_streams],
        out_specs=[*of_streams, lanes(g), tokens(None, d)],
        out_shape=[
            *([jax.ShapeDtypeStruct((n, t, d), stream_TxNxD.dtype)] if mixes else []),
            jax.ShapeDtypeStruct((g, t), F32),
            jax.ShapeDtypeStruct((t, d), y_TxD.dtype),
        ],
        scratch_shapes=[pltpu.VMEM((block, g), F32)] * 2,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=vmem()),
        cost_estimate=_cost(stream_TxNxD, y_TxD, passes=3 if mixes else 1, products=2),
        interpret=interpret,
    )(gates_TxG.T, y_TxD, dnew_NxTxD, *([stream_NxTxD] if mixes else []))
    (dstream_NxTxD,) = dstream or [dnew_NxTxD]
    return jnp.moveaxis(dstream_NxTxD, 0, 1), dgates_GxT.T, dy_TxD


def _gates(gates_TxG, n):
    """(the columns of H by rows, those of s), [T, 1] each."""
    column = [gates_TxG[:, k : k + 1] for k in range(gates_TxG.shape[1])]
    return [column[i : i + n] for i in range(0, len(column) - n, n)], column[-n:]


def _sum(weights, arrays):
    return sum(w * x for w, x in zip(weights, arrays, strict=True))


def _bytes_a_token(n, d, dtype, passes):
    """Of a block on the chip: streams in so many directions and y or its gradient, or both, twice each."""
    return 2 * (passes * n * d + (passes - 1) * d) * jnp.dtype(dtype).itemsize + 4 * 4 * LANES


def _cost(stream_TxNxD, y_TxD, passes, products):
    t, n, d = stream_TxNxD.shape
    moved = passes * stream_TxNxD.nbytes + (passes - 1) * y_TxD.nbytes
    return pl.CostEstimate(flops=2 * products * t * n * (n + 1) * d, transcendentals=0, bytes_accessed=moved)
