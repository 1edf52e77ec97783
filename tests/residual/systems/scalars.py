"""Learned scalars: x' = a x + b F(norm x) + c x0, with x0 the embedding."""

from tests.residual import starts
from tests.residual.statements import final_norm, norm

CASES = [{}, {"gated_norm": 3}]
start = starts.prenorm  # a = b = 1, c = 0


def site(p, stream, y, *, k, eps):
    x, embedding = stream
    return norm(p, x, eps), (p["a"] * x + p["b"] * y + p["c"] * embedding, embedding)


def collapse(p, stream, *, eps):
    return final_norm(p, stream[0], eps)


def expand(x):
    return x, x
