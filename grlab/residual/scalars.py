"""Learned scalars on the plain residual: a x + b F(norm x) + c x0, with x0 the embedding. A strong simple baseline."""

from typing import NamedTuple

import jax

from grlab.ops import streams as ops
from grlab.params import constant
from grlab.residual.prenorm import PreNorm
from grlab.residual.stream import Frame, Norm, Site


class Stream(NamedTuple):
    """The residual stream and the embedding that started it, each [B, T, D]."""

    x: jax.Array
    start: jax.Array


class ScalarSite(Site):
    """x' = a x + b F(norm x) + c x0, one of each scalar a sublayer: a = b = 1 and c = 0 at the start."""

    def __init__(self, frame: Frame, key: jax.Array):
        self.norm = Norm(frame, key)
        self.a = constant(1.0)
        self.b = constant(1.0)
        self.c = constant(0.0)

    def read(self, stream):
        return self.norm(stream.x), None

    def write(self, stream, y_BxTxD, gates):
        x_BxTxD, y_BxTxD, start_BxTxD = (v.astype(ops.F32) for v in (stream.x, y_BxTxD, stream.start))
        x_BxTxD = self.a[...] * x_BxTxD + self.b[...] * y_BxTxD + self.c[...] * start_BxTxD
        return Stream(x_BxTxD.astype(stream.x.dtype), stream.start)


class LearnedScalars(PreNorm, kind="scalars"):
    """The plain stream, carried with its start."""

    def site(self, k, key):
        del k
        return ScalarSite(self.frame, key)

    def expand(self, x_BxTxD):
        x_BxTxD = super().expand(x_BxTxD)
        return Stream(x_BxTxD, x_BxTxD)

    def add(self, stream, f):
        return stream._replace(x=super().add(stream.x, f))

    def collapse(self, stream):
        return super().collapse(stream.x)
