"""The Sinkhorn-Knopp projection of mHC (arXiv 2512.24880, eq. 9), and DeepSeek-V4's form of it."""

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
    return jnp.moveaxis(_balance(h, iterations - 1, 0.0), (0, 1), (-2, -1))


def sinkhorn_v4(logits_NxN: jax.Array, iterations: int, eps: float) -> jax.Array:
    """DeepSeek-V4's projection, as the H_res that it applies: the transpose of its `comb`.

    `comb` is a softmax over its rows + eps, one column normalisation, then `iterations` - 1 times (rows, columns), each
    by the sum + eps. Applied transposed, its last normalisation, too, is over the axis that `streams.mix` contracts.
    Shape [..., N, N], float32.
    """
    comb_NxN = jax.nn.softmax(logits_NxN.astype(jnp.float32), axis=-1) + eps
    h = jnp.moveaxis(comb_NxN, (-2, -1), (1, 0))  # [i, j] of H_res is [j, i] of comb
    h = h / (jnp.sum(h, axis=1, keepdims=True) + eps)
    return jnp.moveaxis(_balance(h, iterations - 1, eps), (0, 1), (-2, -1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _balance(h_NxNxT: jax.Array, iterations: int, eps: float) -> jax.Array:
    """r h c with the scales r of the rows and c of the columns that `iterations` normalisations of both leave.

    Only the scales are iterated: a product and a sum each, instead of a new matrix. A row of r h c sums to r times that
    of h c, and r is divided by this + eps. No sum comes near zero: once the rows sum to 1, an iteration changes a scale
    by a factor of n at most. T stands for all dimensions of the tokens.

    A derivative of its own because XLA makes a slow program of either form of the sums: fused, `jnp.sum` computes the
    columns anew for every row, forwards (16 times slower on a CPU), and sums of slices become paddings, backwards.
    """
    return _forward(h_NxNxT, iterations, eps)[0]


def _forward(h_NxNxT, iterations, eps):
    n = len(h_NxNxT)
    r_NxT, c_NxT = jnp.ones_like(h_NxNxT[:, 0]), jnp.ones_like(h_NxNxT[0])
    scales = [(r_NxT, c_NxT)]
    for _ in range(iterations):
        c_NxT = c_NxT / (c_NxT * sum(h_NxNxT[i] * r_NxT[i] for i in range(n)) + eps)
        r_NxT = r_NxT / (r_NxT * sum(h_NxNxT[:, j] * c_NxT[j] for j in range(n)) + eps)
        scales.append((r_NxT, c_NxT))
    return r_NxT[:, None] * (h_NxNxT * c_NxT), (h_NxNxT, scales)


def _backward(iterations, eps, kept, dout_NxNxT):
    h_NxNxT, scales = kept
    r_NxT, c_NxT = scales[-1]
    dh_NxNxT = dout_NxNxT * (r_NxT[:, None] * c_NxT)
    dr_NxT = jnp.sum(dout_NxNxT * h_NxNxT * c_NxT, axis=1)
    dc_NxT = jnp.sum(dout_NxNxT * h_NxNxT * r_NxT[:, None], axis=0)
    for k in reversed(range(iterations)):
        (r0_NxT, c0_NxT), (r_NxT, c_NxT) = scales[k : k + 2]
        drow_NxT = -dr_NxT * r_NxT**2  # of the sum that r is one over
        dc_NxT = dc_NxT + jnp.sum(h_NxNxT * drow_NxT[:, None], axis=0)
        dcolumn_NxT = -dc_NxT * c_NxT**2  # of the sum that c is one over
        dh_NxNxT = dh_NxNxT + drow_NxT[:, None] * c_NxT + r0_NxT[:, None] * dcolumn_NxT
        # Through eps a scale depends on the one before it, too.
        dr_NxT = jnp.sum(h_NxNxT * dcolumn_NxT, axis=1) + eps * dr_NxT * (r_NxT / r0_NxT) ** 2
        dc_NxT = eps * dc_NxT * (c_NxT / c0_NxT) ** 2
    return (dh_NxNxT,)


_balance.defvjp(_forward, _backward)
