"""Hyper-Connections (HC): n streams, read and mixed by learned maps, static or dynamic. arXiv 2409.19606."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from grlab.ops import streams as ops
from grlab.params import constant, fixed, param
from grlab.residual.stream import Frame, Norm, Site, SummedStreams, home


class HyperConnectionSite(Site):
    """One hyper-connection: h0 = A_mᵀ R, R' = A_rᵀ R + Bᵀ F(norm(h0))   (HC, eq. 2-5).

    Dynamic maps (HC, eq. 10-13), for each stream of R̄ = norm(R):

        B   = s_β tanh(R̄ W_β)ᵀ + B_static
        A_m = s_α tanh(R̄ W_m)  + A_m,static
        A_r = s_α tanh(R̄ W_r)  + A_r,static

    It starts as the pre-norm network: W = 0, s = 0.01, B = 1, A_m = e_{k mod n}, A_r = I. So at step 0 s_α, s_β and
    dyn_gain have no gradient yet: the W they multiply are zero until the first update. A map that is not trained
    (`read`, `mix` or `write` "frozen") keeps its start and has no dynamic part; with A_r frozen it is Identity-HC.
    Of the dynamic parts, which the paper decays, the W decay here; the scales s and the gain do not, as in all systems.
    """

    def __init__(self, switches: "HyperConnections.Switches", frame: Frame, k, key: jax.Array):
        n, d = switches.streams, frame.width
        self.switches = switches
        self.eps = frame.norm_eps
        self.norm = Norm(frame, key)

        static = {"learned": constant, "frozen": fixed}
        self.b = static[switches.write](jnp.ones(n), ("streams",))
        self.a_m = static[switches.read](home(k, n, 1.0, 0.0), ("streams",))
        self.a_r = static[switches.mix](jnp.eye(n), ("streams", "streams"))
        # The dynamic part of each map that is trained.
        if switches.dynamic and switches.write == "learned":
            self.w_beta = param(jnp.zeros(d), ("embed",), decay=True)
            self.s_beta = constant(0.01)
        if switches.dynamic and switches.read == "learned":
            self.w_m = param(jnp.zeros(d), ("embed",), decay=True)
        if switches.dynamic and switches.mix == "learned":
            self.w_r = param(jnp.zeros((d, n)), ("embed", "streams"), decay=True)
        self.projections = [name for name in ("w_beta", "w_m", "w_r") if hasattr(self, name)]
        if self.projections:
            self.dyn_gain = constant(jnp.zeros(d), ("embed",))
        if hasattr(self, "w_m") or hasattr(self, "w_r"):
            self.s_alpha = constant(0.01)

    def maps(self, stream_BxTxNxD):
        """(B [.., N], A_m [.., N], A_r [.., N, N]) in float32."""
        b_N, a_m_N, a_r_NxN = self.b[...], self.a_m[...], self.a_r[...]
        if not self.projections:
            return b_N, a_m_N, a_r_NxN
        ws = [getattr(self, name)[...].reshape(stream_BxTxNxD.shape[-1], -1) for name in self.projections]
        w = (1 + self.dyn_gain[...])[:, None] * jnp.concatenate(ws, axis=1)  # of the normed streams, their gain in it
        out = ops.rms_project(stream_BxTxNxD, w, self.eps)
        if self.switches.tanh:
            out = jnp.tanh(out)
        parts = jnp.split(out, np.cumsum([w.shape[1] for w in ws])[:-1], axis=-1)
        dynamic = dict(zip(self.projections, parts, strict=True))
        if "w_beta" in dynamic:
            b_N = b_N + self.s_beta[...] * dynamic["w_beta"][..., 0]
        if "w_m" in dynamic:
            a_m_N = a_m_N + self.s_alpha[...] * dynamic["w_m"][..., 0]
        if "w_r" in dynamic:
            a_r_NxN = a_r_NxN + self.s_alpha[...] * dynamic["w_r"]
        return b_N, a_m_N, a_r_NxN

    def read(self, stream_BxTxNxD):
        b_N, a_m_N, a_r_NxN = self.maps(stream_BxTxNxD)
        return self.norm(ops.combine(a_m_N, stream_BxTxNxD)), (b_N, a_r_NxN)

    def write(self, stream_BxTxNxD, y_BxTxD, gates):
        b_N, a_r_NxN = gates
        return ops.write(stream_BxTxNxD, b_N[..., None], y_BxTxD, jnp.swapaxes(a_r_NxN, -1, -2))


class HyperConnections(SummedStreams, kind="hc"):
    """Streams [B, T, N, D]: n copies of the embedding at the start, their sum and the final norm at the end."""

    min_streams = 1
    keeps_equal_streams = False  # the rows of A_rᵀ sum to what they learn
    # The W start at zero, so what multiplies them waits for an update; a read of streams that are still copies only
    # scales them, which the norm after it undoes.
    asleep_at_start = frozenset({"s_alpha", "s_beta", "dyn_gain", "a_m", "w_m"})

    @dataclasses.dataclass(frozen=True)
    class Switches:
        streams: int = 4  # any n ≥ 1 (n = 1 is worse than pre-norm in the paper)
        dynamic: bool = True
        tanh: bool = True  # around the dynamic part; without it is an official variant
        # The paper's ablation: a frozen map stays as it starts. read: A_m; mix: A_r (frozen: Identity-HC); write: B.
        read: Literal["learned", "frozen"] = "learned"
        mix: Literal["learned", "frozen"] = "learned"
        write: Literal["learned", "frozen"] = "learned"
        # The paper scales the initial output projections "by √n" and does not say which way.
        output_init: Literal["plain", "times_sqrt_n", "over_sqrt_n"] = "plain"

    def site(self, k, key):
        return HyperConnectionSite(self.switches, self.frame, k, key)

    def initial_std(self, matrix, fan_in, fan_out, std):
        power = {"plain": 0.0, "times_sqrt_n": 0.5, "over_sqrt_n": -0.5}[self.switches.output_init]
        return std * self.switches.streams**power if matrix in ("output", "down") else std
