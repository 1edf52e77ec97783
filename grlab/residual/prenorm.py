"""Pre-norm, the baseline: x + F(RMSNorm(x))."""

import jax
import jax.numpy as jnp

from grlab.ops import streams as ops
from grlab.params import constant
from grlab.residual.stream import FinalNorm, Frame, Residual, Site


class PreNormSite(Site):
    """One residual connection around a sublayer that reads the normalised stream."""

    def __init__(self, frame: Frame):
        self.norm_gain = constant(jnp.zeros(frame.width), ("embed",))
        self.eps = frame.norm_eps
        self.dtype = frame.compute_dtype

    def read(self, stream_BxTxD):
        return ops.rms_norm(stream_BxTxD, self.norm_gain[...], self.eps).astype(self.dtype), None

    def write(self, stream_BxTxD, y_BxTxD, gates):
        return (stream_BxTxD.astype(ops.F32) + y_BxTxD.astype(ops.F32)).astype(stream_BxTxD.dtype)


class PreNorm(Residual, kind="prenorm"):
    """The plain residual stream [B, T, D]."""

    def __init__(self, switches, frame: Frame, key: jax.Array):
        del switches, key
        self.frame = frame
        self.final_norm = FinalNorm(frame, n=1)

    def site(self, k, key):
        del k, key
        return PreNormSite(self.frame)

    def expand(self, x_BxTxD):
        return x_BxTxD.astype(self.frame.stream_dtype)

    def collapse(self, stream_BxTxD):
        return self.final_norm(stream_BxTxD)
