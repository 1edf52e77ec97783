"""Width only, the report's "simplified AltUp": n streams, read by learned scalars, written one at a time.

"On the Design of Qwen3.8-Next Architecture", arXiv 2608.30320, section 2.2.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from grlab.ops import streams as ops
from grlab.params import constant, fixed
from grlab.residual.stream import Frame, Norm, Site, SummedStreams, home


class WidthOnlySite(Site):
    """x = norm(Σ_i h_i R_i), and y is added to stream k mod n alone.

    k counts sublayers: with an even n a stream is written by attentions alone, or by FFNs alone.
    """

    def __init__(self, switches: "WidthOnly.Switches", frame: Frame, k, key: jax.Array):
        n = switches.streams
        home_N = home(k, n, 1.0, 0.0)
        self.norm = Norm(frame, key)
        self.h = constant(home_N if switches.read_init == "home" else jnp.full(n, 1 / n), ("streams",))
        self.target = fixed(home_N, ("streams",))

    def read(self, stream_BxTxNxD):
        return self.norm(ops.combine(self.h[...], stream_BxTxNxD)), None

    def write(self, stream_BxTxNxD, y_BxTxD, gates):
        return ops.write(stream_BxTxNxD, self.target[...][:, None], y_BxTxD)


class WidthOnly(SummedStreams, kind="width_only"):
    """Streams [B, T, N, D]: copies of the embedding at the start; at the end their sum (chosen here) and a norm."""

    # The streams start as copies: a read of them scales them, which the norm after it undoes.
    asleep_at_start = frozenset({"h"})

    @dataclasses.dataclass(frozen=True)
    class Switches:
        streams: int = 4
        read_init: Literal["home", "mean"] = "home"  # h starts as e_{k mod n}, or as 1/n

    def site(self, k, key):
        return WidthOnlySite(self.switches, self.frame, k, key)
