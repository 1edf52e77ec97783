"""DeepNorm, arXiv 2203.00555 section 4, decoder-only: LN(α x + F(x)) with α = (2M)^¼ for M layers."""

from tests.residual.systems import postnorm
from tests.residual.systems.postnorm import collapse, expand

LAYERS = 2
CASES = [{}, {"norm": "rms"}]

__all__ = ["CASES", "LAYERS", "collapse", "expand", "site", "start"]


def start(model, tokens):
    """A network of its own."""
    return postnorm.start(model, tokens, alpha=(2 * LAYERS) ** 0.25)


def site(p, stream, y, *, k, eps, **switches):
    return postnorm.site(p, stream, y, k=k, eps=eps, alpha=(2 * LAYERS) ** 0.25, **switches)
