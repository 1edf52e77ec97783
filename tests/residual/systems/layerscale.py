"""LayerScale, arXiv 2103.17239 eq. 4: x + diag(λ) F(norm(x))."""

from tests.residual import starts
from tests.residual.statements import final_norm, norm

CASES = [{}, {"start": 1e-5}, {"gated_norm": 3}]


def start(model, tokens):
    """Pre-norm whose outputs are scaled by 0.1."""
    return starts.prenorm(model, tokens, write=0.1)


def site(p, stream, y, *, k, eps, **switches):
    return norm(p, stream, eps), stream + p["lam"] * y


def collapse(p, stream, *, eps, **switches):
    return final_norm(p, stream, eps)


def expand(x, **switches):
    return x
