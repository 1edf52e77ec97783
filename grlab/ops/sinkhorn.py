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

    Only the scales are iterated, as their inverses: 1/c becomes the column sums of r h, plus eps/c, then 1/r the row
    sums of h c, plus eps/r. No sum comes near zero: once the rows sum to 1, an iteration changes a scale by a factor of
    n at most. T stands for all dimensions of the tokens.

    A derivative of its own because XLA makes a slow program of either form of the sums backwards; loops because a CPU
    takes as long to begin each of hundreds of small operations as for the operations.
    """
    return _forward(h_NxNxT, iterations, eps)[0]


def _forward(h_NxNxT, iterations, eps):
    def iteration(inverses, _):
        u_NxT, v_NxT = inverses  # 1/c and 1/r
        new_u_NxT = _over_rows(h_NxNxT, 1 / v_NxT) + eps * u_NxT
        new_v_NxT = _over_columns(h_NxNxT, 1 / new_u_NxT) + eps * v_NxT
        return (new_u_NxT, new_v_NxT), (new_u_NxT, v_NxT)

    ones_NxT = jnp.ones_like(h_NxNxT[0])
    (u_NxT, v_NxT), of_iterations = jax.lax.scan(iteration, (ones_NxT, ones_NxT), length=iterations)
    return (1 / v_NxT)[:, None] * (h_NxNxT * (1 / u_NxT)), (h_NxNxT, u_NxT, v_NxT, of_iterations)


def _backward(iterations, eps, kept, dout_NxNxT):
    del iterations
    h_NxNxT, u_NxT, v_NxT, of_iterations = kept
    r_NxT, c_NxT = 1 / v_NxT, 1 / u_NxT

    def iteration(cotangents, inverses):
        dv_NxT, du_NxT, dh_NxNxT = cotangents  # du still without what comes through v
        c_NxT, r_NxT = (1 / x_NxT for x_NxT in inverses)
        du_NxT = du_NxT - _over_rows(h_NxNxT, dv_NxT) * c_NxT**2
        dh_NxNxT = dh_NxNxT + dv_NxT[:, None] * c_NxT + r_NxT[:, None] * du_NxT
        dv_NxT = eps * dv_NxT - _over_columns(h_NxNxT, du_NxT) * r_NxT**2
        return (dv_NxT, eps * du_NxT, dh_NxNxT), None

    dv_NxT = -_over_columns(dout_NxNxT * h_NxNxT, c_NxT) * r_NxT**2
    du_NxT = -_over_rows(dout_NxNxT * h_NxNxT, r_NxT) * c_NxT**2
    dh_NxNxT = dout_NxNxT * (r_NxT[:, None] * c_NxT)
    return (jax.lax.scan(iteration, (dv_NxT, du_NxT, dh_NxNxT), of_iterations, reverse=True)[0][2],)


def _over_rows(h_NxNxT, r_NxT):
    """Σ_i h_ij r_i, written out: fused, `jnp.sum` computes r anew for every column (16 times slower on a CPU)."""
    return sum(h_NxNxT[i] * r_NxT[i] for i in range(len(h_NxNxT)))


def _over_columns(h_NxNxT, c_NxT):
    """Σ_j h_ij c_j."""
    return sum(h_NxNxT[:, j] * c_NxT[j] for j in range(len(h_NxNxT)))


_balance.defvjp(_forward, _backward)
