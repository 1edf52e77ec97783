"""Alternating Updates (AltUp): K blocks, of which a sublayer computes on one. arXiv 2301.13310."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from grlab.ops import streams as ops
from grlab.params import constant, fixed
from grlab.residual.stream import Frame, Norm, Site, SummedStreams, home


class AltUpSite(Site):
    """Predict, compute, correct   (AltUp, Algorithm 1; every sublayer with its own residual is a layer).

        x̂_i  = Σ_j p_ij x_j
        x̃    = x_{j*} + F(norm(x_{j*}))
        x'_i = x̂_i + g_i (x̃ − x̂_{j*})

    It starts as the pre-norm network: p = I, g = 1.
    """

    def __init__(self, switches: "AltUp.Switches", frame: Frame, k, key: jax.Array):
        n = switches.streams
        self.norm = Norm(frame, key)
        self.p = constant(jnp.eye(n), ("streams", "streams"))
        self.g = constant(jnp.ones(n), ("streams",))
        block = {"alternating": k, "layers": k // 2, "same": 0}[switches.select]
        self.active = fixed(home(block, n, 1.0, 0.0), ("streams",))

    def read(self, stream_BxTxNxD):
        return self.norm(ops.combine(self.active[...], stream_BxTxNxD)), None

    def write(self, stream_BxTxNxD, y_BxTxD, gates):
        predicted_BxTxNxD = ops.mix(self.p[...], stream_BxTxNxD)
        computed_BxTxD = ops.combine(self.active[...], stream_BxTxNxD) + y_BxTxD.astype(ops.F32)
        innovation_BxTxD = computed_BxTxD - ops.combine(self.active[...], predicted_BxTxNxD)
        out_BxTxNxD = predicted_BxTxNxD + self.g[...][:, None] * innovation_BxTxD[..., None, :]
        return out_BxTxNxD.astype(stream_BxTxNxD.dtype)


class AltUp(SummedStreams, kind="altup"):
    """Blocks [B, T, K, D]: copies of the embedding at the start, their sum and the final norm at the end.

    That is Recycled-AltUp (section 4.1 of the paper), the form that adds no embedding.
    """

    keeps_equal_streams = False  # the rows of p sum to what they learn

    @dataclasses.dataclass(frozen=True)
    class Switches:
        streams: int = 2  # K, the blocks
        # The block j* of site k: k mod K (at K = 2 one is attention's, the other the FFN's), ⌊k/2⌋ mod K, or block 0.
        select: Literal["alternating", "layers", "same"] = "alternating"

    def site(self, k, key):
        return AltUpSite(self.switches, self.frame, k, key)
