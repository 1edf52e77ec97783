"""Post-norm, the original Transformer's connection: LayerNorm(x + F(x)). arXiv 1706.03762, section 3.1."""

import dataclasses
from typing import Literal

import jax

from grlab.ops import streams as ops
from grlab.residual.stream import Frame, Norm, Residual, Site


class PostNormSite(Site):
    """norm(α x + F(x)); the sublayer reads the stream as it is. Post-norm has α = 1, DeepNorm a larger one."""

    def __init__(self, switches: "PostNorm.Switches", frame: Frame, alpha: float, key: jax.Array):
        self.norm = Norm(frame, key, layer_norm=switches.norm == "layer")
        self.alpha = alpha
        self.dtype = frame.compute_dtype

    def read(self, stream_BxTxD):
        return stream_BxTxD.astype(self.dtype), None

    def write(self, stream_BxTxD, y_BxTxD, gates):
        summed_BxTxD = self.alpha * stream_BxTxD.astype(ops.F32) + y_BxTxD.astype(ops.F32)
        return self.norm.exact(summed_BxTxD).astype(stream_BxTxD.dtype)


class PostNorm(Residual, kind="postnorm"):
    """The plain stream [B, T, D], normed by every site; so the end has no norm of its own."""

    @dataclasses.dataclass(frozen=True)
    class Switches:
        norm: Literal["layer", "rms"] = "layer"

    def __init__(self, switches: Switches, frame: Frame, key: jax.Array):
        del key
        self.switches = switches
        self.frame = frame

    def site(self, k, key):
        del k
        return PostNormSite(self.switches, self.frame, 1.0, key)

    def expand(self, x_BxTxD):
        return x_BxTxD.astype(self.frame.stream_dtype)

    def collapse(self, stream_BxTxD):
        return stream_BxTxD.astype(self.frame.compute_dtype)
