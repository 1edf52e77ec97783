"""ReZero: x + a F(x), with a = 0 at the start. arXiv 2003.04887."""

import dataclasses
from typing import Literal

from grlab.ops import streams as ops
from grlab.params import constant
from grlab.residual.prenorm import PreNorm, PreNormSite
from grlab.residual.stream import Frame


class ReZeroSite(PreNormSite):
    """One scalar a sublayer. The paper's Transformer has no norms: the sublayer reads the stream as it is.

    With this model's small embedding that is a small input, on which the gated FFN starts much weaker than attention.
    """

    def __init__(self, switches: "ReZero.Switches", frame: Frame, key):
        if switches.norm == "pre":
            super().__init__(frame, key)
        self.a = constant(0.0)
        self.dtype = frame.compute_dtype

    def read(self, stream_BxTxD):
        return super().read(stream_BxTxD) if hasattr(self, "norm") else (stream_BxTxD.astype(self.dtype), None)

    def write(self, stream_BxTxD, y_BxTxD, gates):
        return super().write(stream_BxTxD, self.a[...] * y_BxTxD.astype(ops.F32), gates)


class ReZero(PreNorm, kind="rezero"):
    """The plain stream [B, T, D], with a final norm before the head (chosen here: it keeps the logits' scale)."""

    # Nothing of a sublayer has a gradient until its a has left zero.
    asleep_at_start = frozenset(
        {"query", "key", "value", "output", "query_gain", "key_gain", "gate", "up", "down", "gain", "w_down", "w_up"}
    )

    @dataclasses.dataclass(frozen=True)
    class Switches:
        norm: Literal["none", "pre"] = "none"  # pre: RMSNorm before each sublayer

    def __init__(self, switches: Switches, frame: Frame, key):
        super().__init__(switches, frame, key)
        self.switches = switches

    def site(self, k, key):
        del k
        return ReZeroSite(self.switches, self.frame, key)
