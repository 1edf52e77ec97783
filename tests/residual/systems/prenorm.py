"""Pre-norm: x = RMSNorm(R), R' = R + y."""

from tests.residual import starts
from tests.residual.statements import final_norm, norm

CASES = [{}, {"gated_norm": 3}]
start = starts.prenorm


def site(p, stream, y, *, k, eps):
    return norm(p, stream, eps), stream + y


def collapse(p, stream, *, eps):
    return final_norm(p, stream, eps)


def expand(x):
    return x
