"""Sinkhorn-Knopp: the derivative that `grlab/ops/sinkhorn.py` states, beside that of the projections as defined.

Seen to fail: a column's own derivative left out of its sum's; the scales of the iteration after; the last scales for
every iteration; no square of r; the derivative through eps left out, of a row or of a column; eps added to the sum of h
alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grlab.ops.sinkhorn import sinkhorn, sinkhorn_v4
from tests.residual.functional import compiled


def plain(logits_NxN, iterations):
    """The projection as defined: a matrix normalised by columns, then by rows."""
    h = jnp.exp(logits_NxN)
    for _ in range(iterations):
        h = h / jnp.sum(h, axis=-2, keepdims=True)
        h = h / jnp.sum(h, axis=-1, keepdims=True)
    return h


def plain_v4(logits_NxN, iterations, eps):
    """DeepSeek-V4's projection as defined, on its `comb`, and transposed as it is applied."""
    comb = jax.nn.softmax(logits_NxN, axis=-1) + eps
    comb = comb / (jnp.sum(comb, axis=-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (jnp.sum(comb, axis=-1, keepdims=True) + eps)
        comb = comb / (jnp.sum(comb, axis=-2, keepdims=True) + eps)
    return jnp.swapaxes(comb, -2, -1)


# An eps at which what it does shows in the values and in the gradient; the model's is 1e-6.
FORMS = {
    "paper": (sinkhorn, plain),
    "deepseek_v4": (functools.partial(sinkhorn_v4, eps=0.1), functools.partial(plain_v4, eps=0.1)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n, iterations", [(1, 3), (2, 1), (2, 2), (4, 3), (4, 20), (5, 4)])
def test_the_gradient_is_that_of_the_definition(n, iterations, form):
    projection, definition = FORMS[form]
    logits, cotangent = (2 * jax.random.normal(jax.random.key(i), (3, 5, n, n)) for i in (0, 1))

    def loss(project, logits):
        return jnp.sum(cotangent * project(logits, iterations))

    with jax.enable_x64():
        exact = compiled(jax.value_and_grad(functools.partial(loss, definition)))(logits.astype(jnp.float64))
    ours = compiled(jax.value_and_grad(functools.partial(loss, projection)))(logits)
    np.testing.assert_allclose(ours[0], exact[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours[1], exact[1], rtol=0, atol=2e-6 * max(1, np.abs(exact[1]).max()))


def test_a_matrix_alone_is_projected_as_in_a_batch():
    logits = jax.random.normal(jax.random.key(0), (2, 4, 4))
    np.testing.assert_allclose(sinkhorn(logits[1], 20), sinkhorn(logits, 20)[1], rtol=1e-6)
