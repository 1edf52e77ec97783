"""The Sinkhorn-Knopp projection of mHC (arXiv 2512.24880, eq. 9)."""

import functools

import jax
import jax.numpy as jnp


def sinkhorn(logits_NxN: jax.Array, iterations: int) -> jax.Array:
    """The doubly stochastic projection of exp(logits): `iterations` times columns first, rows last.

    The rows are normalised last because `streams.mix` contracts them: equal streams then come out unchanged to
    rounding, however far the columns still are from their sum. The first iteration runs on logarithms, so that no logit
    overflows. Shape [..., N, N], float32.
    """
    h = jnp.moveaxis(logits_NxN.astype(jnp.float32), (-2, -1), (0, 1))  # the tokens along the vector lanes
    h = h - jax.nn.logsumexp(h, axis=0, keepdims=True)
    h = jnp.exp(h - jax.nn.logsumexp(h, axis=1, keepdims=True))
    return jnp.moveaxis(_balance(h, iterations - 1), (0, 1), (-2, -1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _balance(h_NxNxT: jax.Array, iterations: int) -> jax.Array:
    """r h c with the scales r of the rows and c of the columns that `iterations` normalisations of both leave.

    Only the scales are iterated: a product and a sum each, instead of a new matrix. No sum comes near zero: once the
    rows sum to 1, an iteration changes a scale by a factor of n at most. T stands for all dimensions of the tokens.

    A derivative of its own because XLA makes a slow program of either form of the sums: fused, `jnp.sum` computes the
    columns anew for every row, forwards (16 times slower on a CPU), and sums of slices become paddings, backwards.
    """
    return _forward(h_NxNxT, iterations)[0]


def _forward(h_NxNxT, iterations):
    n = len(h_NxNxT)
    r_NxT = jnp.ones_like(h_NxNxT[:, 0])
    scales = [(r_NxT, jnp.ones_like(h_NxNxT[0]))]
    for _ in range(iterations):
        c_NxT = 1 / sum(h_NxNxT[i] * r_NxT[i] for i in range(n))
        r_NxT = 1 / sum(h_NxNxT[:, j] * c_NxT[j] for j in range(n))
        scales.append((r_NxT, c_NxT))
    r_NxT, c_NxT = scales[-1]
    return r_NxT[:, None] * (h_NxNxT * c_NxT), (h_NxNxT, scales)


def _backward(iterations, kept, dout_NxNxT):
    h_NxNxT, scales = kept
    r_NxT, c_NxT = scales[-1]
    dh_NxNxT = dout_NxNxT * (r_NxT[:, None] * c_NxT)
    dr_NxT = jnp.sum(dout_NxNxT * h_NxNxT * c_NxT, axis=1)
    dc_NxT = jnp.sum(dout_NxNxT * h_NxNxT * r_NxT[:, None], axis=0)
    for k in reversed(range(iterations)):
        (before_NxT, _), (r_NxT, c_NxT) = scales[k : k + 2]
        drow_NxT = -dr_NxT * r_NxT**2  # of the sum that r is one over
        dc_NxT = dc_NxT + jnp.sum(h_NxNxT * drow_NxT[:, None], axis=0)
        dcolumn_NxT = -dc_NxT * c_NxT**2  # of the sum that c is one over
        dh_NxNxT = dh_NxNxT + drow_NxT[:, None] * c_NxT + before_NxT[:, None] * dcolumn_NxT
        dr_NxT, dc_NxT = jnp.sum(h_NxNxT * dcolumn_NxT, axis=1), 0.0
    return (dh_NxNxT,)


_balance.defvjp(_forward, _backward)
