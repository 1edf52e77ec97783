"""The projections of grlab/ops/sinkhorn.py inside a kernel for TPUs, the tokens along the lanes.

A matrix of each token is a list of its N rows, [N, T] each: the j-th of N sublanes is column j. Sums over the rows are
then of whole arrays; for those over the columns the transposed matrix is at hand, too. `eps` is None for the paper's
projection and DeepSeek-V4's epsilon for its own. The iterations, and what their derivative needs, are those of
`sinkhorn._balance`.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from grlab.ops.tpu import F32


def kept(iterations: int, n: int, tokens: int):
    """The scratch for what a derivative keeps of the iterations."""
    return pltpu.VMEM((max(iterations - 1, 1), 2, n, tokens), F32)


def project(logits: list, iterations: int, eps: float | None, kept_ref=None) -> list:
    """H, doubly stochastic."""
    _, h = _start(logits, eps)
    u_NxT, v_NxT = _balance(h, iterations - 1, eps or 0.0, kept_ref)
    return _scaled(h, u_NxT, v_NxT)


def gradient(logits: list, iterations: int, eps: float | None, dout: list, kept_ref) -> list:
    """The cotangents of the logits, of those of H. `kept_ref` is a scratch."""
    of_start, h = _start(logits, eps)
    inverses = _balance(h, iterations - 1, eps or 0.0, kept_ref)
    return _start_gradient(of_start, eps, _balance_gradient(h, inverses, iterations - 1, eps or 0.0, dout, kept_ref))


def _start(logits, eps):
    """(what the derivative needs, the rows after the first normalisation of both)."""
    if eps is None:
        most_NxT = logits[0]
        for row_NxT in logits[1:]:
            most_NxT = jnp.maximum(most_NxT, row_NxT)
        sum_NxT = sum(jnp.exp(row_NxT - most_NxT) for row_NxT in logits)
        logs = [row_NxT - most_NxT - jnp.log(sum_NxT) for row_NxT in logits]
        h = [_softmax(row_NxT) for row_NxT in logs]
        return (logs, h), h
    comb = [_softmax(row_NxT) + eps for row_NxT in logits]
    before = transposed(comb)
    return (comb, before), [row_NxT / (_sum(row_NxT) + eps) for row_NxT in before]


def _start_gradient(of_start, eps, dh):
    if eps is None:
        logs, h = of_start
        dlogs = [row_NxT * (d_NxT - _sum(row_NxT * d_NxT)) for row_NxT, d_NxT in zip(h, dh, strict=True)]
        sum_NxT = sum(dlogs)
        return [d_NxT - jnp.exp(row_NxT) * sum_NxT for row_NxT, d_NxT in zip(logs, dlogs, strict=True)]
    comb, before = of_start
    dbefore = []
    for row_NxT, d_NxT in zip(before, dh, strict=True):
        inverse_1xT = 1 / (_sum(row_NxT) + eps)
        dbefore.append(inverse_1xT * (d_NxT - inverse_1xT * _sum(row_NxT * d_NxT)))
    out = []
    for row_NxT, d_NxT in zip(comb, transposed(dbefore), strict=True):
        softmax_NxT = row_NxT - eps
        out.append(softmax_NxT * (d_NxT - _sum(softmax_NxT * d_NxT)))
    return out


def _balance(h, iterations, eps, kept_ref):
    """(1/c, 1/r) of the scales that the iterations leave, [N, T] both."""
    turned = transposed(h)

    def iteration(k, inverses):
        u_NxT, v_NxT = inverses
        new_u_NxT = _over(h, 1 / v_NxT) + eps * u_NxT
        if kept_ref is not None:
            kept_ref[k, 0], kept_ref[k, 1] = new_u_NxT, v_NxT
        return new_u_NxT, _over(turned, 1 / new_u_NxT) + eps * v_NxT

    ones_NxT = jnp.ones_like(h[0])
    return jax.lax.fori_loop(0, iterations, iteration, (ones_NxT, ones_NxT))


def _scaled(h, u_NxT, v_NxT):
    c_NxT, r_NxT = 1 / u_NxT, 1 / v_NxT
    return [r_NxT[i : i + 1] * (row_NxT * c_NxT) for i, row_NxT in enumerate(h)]


def _balance_gradient(h, inverses, iterations, eps, dout, kept_ref):
    n, turned = len(h), transposed(h)
    c_NxT, r_NxT = (1 / x_NxT for x_NxT in inverses)

    def iteration(k, cotangents):
        dv_NxT, du_NxT, *dh = cotangents  # du still without what comes through v
        c_NxT, r_NxT = (1 / kept_ref[iterations - 1 - k, which] for which in range(2))
        du_NxT = du_NxT - _over(h, dv_NxT) * c_NxT**2
        dh = [dh[i] + dv_NxT[i : i + 1] * c_NxT + r_NxT[i : i + 1] * du_NxT for i in range(n)]
        dv_NxT = eps * dv_NxT - _over(turned, du_NxT) * r_NxT**2
        return dv_NxT, eps * du_NxT, *dh

    products = [d_NxT * row_NxT for d_NxT, row_NxT in zip(dout, h, strict=True)]
    dv_NxT = -_over(transposed(products), c_NxT) * r_NxT**2
    du_NxT = -_over(products, r_NxT) * c_NxT**2
    dh = [r_NxT[i : i + 1] * (d_NxT * c_NxT) for i, d_NxT in enumerate(dout)]
    return jax.lax.fori_loop(0, iterations, iteration, (dv_NxT, du_NxT, *dh))[2:]


def transposed(rows: list) -> list:
    return [jnp.concatenate([row[j : j + 1] for row in rows], axis=0) for j in range(len(rows))]


def _softmax(row_NxT):
    exp_NxT = jnp.exp(row_NxT - jnp.max(row_NxT, axis=0, keepdims=True))
    return exp_NxT / _sum(exp_NxT)


def _sum(x_NxT):
    return jnp.sum(x_NxT, axis=0, keepdims=True)


def _over(rows, weights_NxT):
    """Σ_i rows_i weights_i."""
    return sum(row_NxT * weights_NxT[i : i + 1] for i, row_NxT in enumerate(rows))
