"""Post-norm, arXiv 1706.03762 section 3.1: LayerNorm(x + F(x)), F on the stream as it is."""

from tests.residual import starts
from tests.residual.statements import norm

CASES = [{}, {"norm": "rms"}, {"gated_norm": 3}]


def start(model, tokens, alpha=1.0):
    """A network of its own."""
    x_BxTxD = starts.embed(model, tokens)
    for sublayer in starts.sublayers(model):
        x_BxTxD = starts.layer_norm(alpha * x_BxTxD + sublayer(x_BxTxD))
    return x_BxTxD @ model.head[...], starts.EXACT


def site(p, stream, y, *, k, eps, alpha=1.0, **switches):
    assert ("norm.bias" in p) == (switches.get("norm") != "rms")
    return stream, norm(p, alpha * stream + y, eps)


def collapse(p, stream, *, eps, **switches):
    return stream


def expand(x, **switches):
    return x
