"""Pre-norm, the baseline: x + F(RMSNorm(x))."""

import jax

from grlab.ops import streams as ops
from grlab.params import fold
from grlab.residual.stream import Frame, Norm, Residual, Site


class PreNormSite(Site):
    """One residual connection around a sublayer that reads the normalised stream."""

    def __init__(self, frame: Frame, key: jax.Array):
        self.norm = Norm(frame, key)

    def read(self, stream_BxTxD):
        return self.norm(stream_BxTxD), None

    def write(self, stream_BxTxD, y_BxTxD, gates):
        return (stream_BxTxD.astype(ops.F32) + y_BxTxD.astype(ops.F32)).astype(stream_BxTxD.dtype)


class PreNorm(Residual, kind="prenorm"):
    """The plain residual stream [B, T, D]."""

    def __init__(self, switches, frame: Frame, key: jax.Array):
        del switches
        self.frame = frame
        self.final_norm = Norm(frame, fold(key, "final_norm"))

    def site(self, k, key):
        del k
        return PreNormSite(self.frame, key)

    def expand(self, x_BxTxD):
        return x_BxTxD.astype(self.frame.stream_dtype)

    def collapse(self, stream_BxTxD):
        return self.final_norm(stream_BxTxD)
