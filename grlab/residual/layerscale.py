"""LayerScale: x + λ ⊙ F(norm(x)), λ a channel's own. arXiv 2103.17239."""

import dataclasses

import jax
import jax.numpy as jnp

from grlab import errors
from grlab.ops import streams as ops
from grlab.params import constant
from grlab.residual.prenorm import PreNorm, PreNormSite
from grlab.residual.stream import Frame


class LayerScaleSite(PreNormSite):
    """The pre-norm connection with λ [D] on the sublayer's output."""

    def __init__(self, frame: Frame, start: float, key: jax.Array):
        super().__init__(frame, key)
        self.lam = constant(jnp.full(frame.width, start), ("embed",))

    def write(self, stream_BxTxD, y_BxTxD, gates):
        return super().write(stream_BxTxD, self.lam[...] * y_BxTxD.astype(ops.F32), gates)


class LayerScale(PreNorm, kind="layerscale"):
    """The plain stream [B, T, D]."""

    @dataclasses.dataclass(frozen=True)
    class Switches:
        start: float = 0.1  # λ; the paper starts at 0.1 up to depth 18, 1e-5 up to 24, 1e-6 beyond

    def __init__(self, switches: Switches, frame: Frame, key: jax.Array):
        errors.positive("residual.start", switches.start)
        super().__init__(switches, frame, key)
        self.switches = switches

    def site(self, k, key):
        del k
        return LayerScaleSite(self.frame, self.switches.start, key)
