"""Hyper-Connections (HC): n streams, read and mixed by learned maps, static or dynamic. arXiv 2409.19606."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from grlab import errors
from grlab.ops import streams as ops
from grlab.params import constant, param
from grlab.residual.stream import FinalNorm, Frame, Residual, Site, home


class HyperConnectionSite(Site):
    """One hyper-connection: h0 = A_mᵀ R, R' = A_rᵀ R + Bᵀ F(norm(h0))   (HC, eq. 2-5).

    Dynamic maps (HC, eq. 10-13), for each stream of R̄ = norm(R):

        B   = s_β tanh(R̄ W_β)ᵀ + B_static
        A_m = s_α tanh(R̄ W_m)  + A_m,static
        A_r = s_α tanh(R̄ W_r)  + A_r,static

    It starts as the pre-norm network: W = 0, s = 0.01, B = 1, A_m = e_{k mod n}, A_r = I. So at step 0 s_α, s_β and
    dyn_gain have no gradient yet: the W they multiply are zero until the first update.
    """

    def __init__(self, switches: "HyperConnections.Switches", frame: Frame, k):
        n, d = switches.streams, frame.width
        self.switches = switches
        self.eps = frame.norm_eps
        self.dtype = frame.compute_dtype
        self.norm_gain = constant(jnp.zeros(d), ("embed",))
        self.b = constant(jnp.ones(n), ("streams",))
        self.a_m = constant(home(k, n, 1.0, 0.0), ("streams",))
        self.a_r = constant(jnp.eye(n), ("streams", "streams"))
        if switches.dynamic:
            self.dyn_gain = constant(jnp.zeros(d), ("embed",))
            self.w_beta = param(jnp.zeros(d), ("embed",), decay=True)
            self.w_m = param(jnp.zeros(d), ("embed",), decay=True)
            self.w_r = param(jnp.zeros((d, n)), ("embed", "streams"), decay=True)
            self.s_alpha = constant(0.01)
            self.s_beta = constant(0.01)

    def maps(self, stream_BxTxNxD):
        """(B [.., N], A_m [.., N], A_r [.., N, N]) in float32."""
        b_N, a_m_N, a_r_NxN = self.b[...], self.a_m[...], self.a_r[...]
        if not self.switches.dynamic:
            return b_N, a_m_N, a_r_NxN
        normed_BxTxNxD = ops.rms_norm(stream_BxTxNxD, self.dyn_gain[...], self.eps)
        w_Dx2pN = jnp.concatenate([self.w_beta[...][:, None], self.w_m[...][:, None], self.w_r[...]], axis=1)
        out_BxTxNx2pN = ops.project(normed_BxTxNxD, w_Dx2pN, ops.F32)
        if self.switches.tanh:
            out_BxTxNx2pN = jnp.tanh(out_BxTxNx2pN)
        s_alpha, s_beta = self.s_alpha[...], self.s_beta[...]
        return (
            b_N + s_beta * out_BxTxNx2pN[..., 0],
            a_m_N + s_alpha * out_BxTxNx2pN[..., 1],
            a_r_NxN + s_alpha * out_BxTxNx2pN[..., 2:],
        )

    def read(self, stream_BxTxNxD):
        b_N, a_m_N, a_r_NxN = self.maps(stream_BxTxNxD)
        h0_BxTxD = ops.combine(a_m_N, stream_BxTxNxD)
        return ops.rms_norm(h0_BxTxD, self.norm_gain[...], self.eps).astype(self.dtype), (b_N, a_r_NxN)

    def write(self, stream_BxTxNxD, y_BxTxD, gates):
        b_N, a_r_NxN = gates
        return ops.write(stream_BxTxNxD, b_N[..., None], y_BxTxD, jnp.swapaxes(a_r_NxN, -1, -2))


class HyperConnections(Residual, kind="hc"):
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
        # The paper scales the initial output projections "by √n" and does not say which way.
        output_init: Literal["plain", "times_sqrt_n", "over_sqrt_n"] = "plain"

    def __init__(self, switches: Switches, frame: Frame, key: jax.Array):
        del key
        errors.positive("residual.streams", switches.streams)
        self.switches = switches
        self.frame = frame
        self.final_norm = FinalNorm(frame, switches.streams)

    def site(self, k, key):
        del key
        return HyperConnectionSite(self.switches, self.frame, k)

    def expand(self, x_BxTxD):
        return ops.repeat(x_BxTxD.astype(self.frame.stream_dtype), self.switches.streams)

    def collapse(self, stream_BxTxNxD):
        return self.final_norm(jnp.sum(stream_BxTxNxD.astype(ops.F32), axis=-2))

    def initial_scale(self, matrix):
        power = {"plain": 0.0, "times_sqrt_n": 0.5, "over_sqrt_n": -0.5}[self.switches.output_init]
        return self.switches.streams**power if matrix in ("output", "down") else 1.0
