"""ReZero, arXiv 2003.04887 eq. 3: x + a F(x), without norms in the paper's Transformer."""

from tests.residual import starts
from tests.residual.statements import final_norm, norm

CASES = [{}, {"norm": "pre"}, {"norm": "pre", "gated_norm": 3}]


def start(model, tokens):
    """a = 0: the embedding through the final norm and the head, no sublayer at all."""
    return starts.prenorm(model, tokens, write=0.0)


def site(p, stream, y, *, k, eps, **switches):
    return norm(p, stream, eps) if switches.get("norm") == "pre" else stream, stream + p["a"] * y


def collapse(p, stream, *, eps, **switches):
    return final_norm(p, stream, eps)


def expand(x, **switches):
    return x
