"""Gated Residuals (GR): streams read through gates on every channel, written by a gate a stream, and never mixed.

"On the Design of Qwen3.8-Next Architecture", arXiv 2608.30320, eq. 30-35; every design axis of its §2.2 is a switch.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from grlab import errors
from grlab.ops import float8, gated
from grlab.ops import streams as ops
from grlab.ops.sinkhorn import sinkhorn
from grlab.params import constant, fixed, fold, normal
from grlab.residual.stream import Frame, Residual, Site, check_permutations, home, near_identity


class GatedSite(Site):
    """One gated connection   (eq. 30-35; n streams, rank r).

        R̂_i = RMSNorm(R_i) ⊙ (1 + gain_i)
        G    = σ(W_up SiLU(W_down vec R̂ / n))          [n, d]
        x    = mean_i G_i ⊙ R̂_i                         no other norm: the read is the pre-norm
        s    = 2σ(W_write vec R̂ / n)                    [n]
        R'_i = R_i + s_i y

    The report names the design axes and gives formulas for the published choice alone, and for static terms in general
    (eq. 26-28, outside the squashing; here they are inside, as mHC's paper has them). The others are chosen here:

        read=scalar          G_i = σ((W_read vec R̂)_i / n), for all channels of stream i
        write=channel        s as G is, from projections of its own, times 2
        gates=static         logits b alone, no data: +1 on the home stream k mod n and −1 on the others, since equal b
                             would keep the streams equal for ever (an H_res of `mix` stays dynamic)
        static_term          logits b + the dynamic ones
        gate=tanh            1 + λ tanh(logits), λ learned from 0.01, for read and write: it starts at the pre-norm's
                             scale, so it compares with gate_range=2
        init_std             0.02 as published, for d = 2560; the spread of the gates at the start grows with the width,
                             and at 1/√d (rank d/8) every width has the published one's: 0.1 in the logits of reads, 0.5
                             in those of writes. Never 0: the streams would stay equal for ever
        gate_range=2         a read gate 2σ, which starts at the pre-norm's scale
        mix=free             R' = H R + s y with H = I + λ tanh(W_res vec R̂ / n), λ learned from 0.01
        mix=sinkhorn         H = Sinkhorn-Knopp(exp(α W_res vec R̂ + b)), α from 0.01, b = 6 I − 3 (as mHC)
        mix=permutations     H = Σ_p softmax(α W_res vec R̂ + b)_p P_p, b as mHC-lite
        norm=joint           one RMS over all n·d values; shared_gain: one gain [d] for all streams
        gate_input=last      logits from R̂_n alone; pooled: from the mean of R̂ over the streams; no 1/n in either
        stream_dtype=float8_e4m3fn   R'_i is stored in 8 bits, a scale for each token and stream (grlab/ops/float8.py)
        top_k                only the k streams with the highest mean read gate are read; the mean stays over n

    The final site (`writes=False`) is the read that feeds the LM head, without an FFN or a final norm between.
    """

    def __init__(self, switches: "GatedResidual.Switches", frame: Frame, k, key: jax.Array, *, writes: bool = True):
        n, d = switches.streams, frame.width
        self.switches = switches
        self.eps = frame.norm_eps
        self.dtype = frame.compute_dtype
        self.writes = writes
        self.float8 = frame.float8
        if frame.float8 and switches.rounding == "stochastic":
            self.k = fixed(k)
        self.fan_in = n * d if switches.gate_input == "all" else d
        gates = (switches.read, switches.write, switches.gates, switches.gate, switches.gate_input)
        as_published = gates == ("channel", "scalar", "dynamic", "sigmoid", "all")
        self.published = as_published and switches.norm != "joint" and not switches.static_term and not switches.top_k
        self.joins = self.published and switches.mix == "none" and not frame.float8

        if switches.norm == "shared_gain":
            self.gain = constant(jnp.zeros(d), ("embed",))
        else:
            self.gain = constant(jnp.zeros((n, d)), ("streams", "embed"))

        self._make_gate(key, "read", switches.read)
        if writes:
            self._make_gate(key, "write", switches.write)
            if switches.mix == "free":
                self.lam_res = constant(0.01)
            elif switches.mix != "none":
                self.alpha_res = constant(0.01)
            if switches.mix == "sinkhorn":
                self.b_res = constant(6.0 * jnp.eye(n) - 3.0, ("streams", "streams"))
            elif switches.mix == "permutations":
                self.b_res = constant(near_identity(n), ("streams",))
            if switches.mix != "none":
                columns = self.b_res.size if hasattr(self, "b_res") else n * n
                self.w_res = normal(key, "w_res", (n * d, columns), ("flat", "streams"), switches.init_std)
        if switches.gates == "static" or switches.static_term:
            start_N = home(k, n, 1.0, -1.0)
            for name, granularity in (("read", switches.read), ("write", switches.write))[: 1 + writes]:
                if granularity == "channel":
                    b = constant(jnp.tile(start_N[:, None], (1, d)), ("streams", "embed"))
                else:
                    b = constant(start_N, ("streams",))
                setattr(self, f"b_{name}", b)
        if switches.gate == "tanh":
            self.lam_read = constant(0.01)
            if writes:
                self.lam_write = constant(0.01)

    def _make_gate(self, key: jax.Array, name: str, granularity: str):
        """The projections of the `name` gate: low rank to a gate a channel, or straight to one a stream."""
        n, d, r, std = self.switches.streams, self.gain.shape[-1], self.switches.rank, self.switches.init_std
        if self.switches.gates == "static":
            return
        if granularity == "scalar":
            setattr(self, f"w_{name}", normal(key, f"w_{name}", (self.fan_in, n), ("flat", "streams"), std))
        else:
            stem = "w" if name == "read" else f"w_{name}"
            setattr(self, f"{stem}_down", normal(key, f"{stem}_down", (self.fan_in, r), ("flat", "rank"), std))
            setattr(self, f"{stem}_up", normal(key, f"{stem}_up", (r, n * d), ("rank", "flat"), std))

    def normalise(self, stream_BxTxNxD):
        """R̂ [B, T, N, D] in float32."""
        axis = (-2, -1) if self.switches.norm == "joint" else -1
        return ops.rms_normalise(stream_BxTxNxD, self.eps, axis) * (1 + self.gain[...])

    def _gate_input(self, normed_BxTxNxD):
        """What the gates are predicted from [B, T, fan_in], and the divisor of its projections."""
        which = self.switches.gate_input
        if which == "last":
            return normed_BxTxNxD[..., -1, :], 1
        if which == "pooled":
            return jnp.mean(normed_BxTxNxD, axis=-2), 1
        return ops.flatten(normed_BxTxNxD), self.switches.streams

    def _logits(self, name: str, granularity: str, source_BxTxI, divisor: int):
        """The logits of the `name` gate: [.., N, 1] for a gate a stream, [.., N, D] for one a channel; float32."""
        static = 0.0
        if hasattr(self, f"b_{name}"):
            static = getattr(self, f"b_{name}")[...]
            static = static[:, None] if granularity == "scalar" else static
        if self.switches.gates == "static":
            return static
        if granularity == "scalar":
            w = getattr(self, f"w_{name}")[...]
            return static + (ops.project(source_BxTxI, w, self.dtype) / divisor)[..., None]
        stem = "w" if name == "read" else f"w_{name}"
        w_down, w_up = getattr(self, f"{stem}_down")[...], getattr(self, f"{stem}_up")[...]
        z_BxTxR = jax.nn.silu(ops.project(source_BxTxI, w_down, self.dtype) / divisor)
        out_BxTxND = ops.project(z_BxTxR, w_up, self.dtype)
        return static + out_BxTxND.reshape(*out_BxTxND.shape[:-1], self.switches.streams, -1)

    def _gate(self, name: str, logits, reach: int):
        """The gate of its logits: between 0 and `reach`, or around 1 for tanh."""
        if self.switches.gate == "tanh":
            return 1 + getattr(self, f"lam_{name}")[...] * jnp.tanh(logits)
        return reach * jax.nn.sigmoid(logits)

    def _mixing(self, out):
        """H_res [B, T, N, N] in float32 of W_res vec R̂."""
        mix, n = self.switches.mix, self.switches.streams
        if mix == "permutations":
            return ops.permutation_mixture(self.alpha_res[...] * out + self.b_res[...], n)
        out_BxTxNxN = out.reshape(*out.shape[:-1], n, n)
        if mix == "free":
            return jnp.eye(n) + self.lam_res[...] * jnp.tanh(out_BxTxNxN / n)
        return sinkhorn(self.alpha_res[...] * out_BxTxNxN + self.b_res[...], iterations=20)

    def read(self, stream_BxTxNxD):
        return self._published_read(stream_BxTxNxD)[1:] if self.published else self._any_read(stream_BxTxNxD)

    def write_read(self, stream_BxTxNxD, y_BxTxD, gates, next_site):
        if not self.joins:
            return super().write_read(stream_BxTxNxD, y_BxTxD, gates, next_site)
        return next_site._published_read(stream_BxTxNxD, (gates[0][..., 0], y_BxTxD))

    def _published_read(self, stream_BxTxNxD, written=()):
        """(the streams after s ⊗ y of `written`, the read of them as published): one operation."""
        n = self.switches.streams
        w_more = [getattr(self, name)[...] for name in ("w_write", "w_res") if hasattr(self, name)]
        w_more = jnp.concatenate(w_more, axis=1) if w_more else jnp.zeros((self.fan_in, 0))
        gain, w_down, w_up = self.gain[...], self.w_down[...], self.w_up[...]
        weights = (gain, w_down, w_up, w_more, self.eps, self.switches.gate_range, self.dtype)
        if written:
            stream_BxTxNxD, x_BxTxD, more = gated.write_read(stream_BxTxNxD, *written, *weights)
        else:
            x_BxTxD, more = gated.read(stream_BxTxNxD, *weights)
        if not self.writes:
            return stream_BxTxNxD, x_BxTxD, None
        s_BxTxNx1 = 2 * jax.nn.sigmoid(more[..., :n] / n)[..., None]
        h_BxTxNxN = self._mixing(more[..., n:]) if hasattr(self, "w_res") else None
        return stream_BxTxNxD, x_BxTxD, (s_BxTxNx1, h_BxTxNxN)

    def _any_read(self, stream_BxTxNxD):
        switches = self.switches
        normed_BxTxNxD = self.normalise(stream_BxTxNxD)
        source, divisor = self._gate_input(normed_BxTxNxD)
        g_BxTxNxD = self._gate("read", self._logits("read", switches.read, source, divisor), switches.gate_range)
        if switches.top_k:
            score_BxTxN = jnp.mean(jnp.broadcast_to(g_BxTxNxD, normed_BxTxNxD.shape), axis=-1)
            rank_BxTxN = jnp.argsort(jnp.argsort(-score_BxTxN, axis=-1), axis=-1)
            g_BxTxNxD = jnp.where((rank_BxTxN < switches.top_k)[..., None], g_BxTxNxD, 0.0)
        x_BxTxD = jnp.mean(g_BxTxNxD * normed_BxTxNxD, axis=-2).astype(self.dtype)
        if not self.writes:
            return x_BxTxD, None
        s_BxTxNx1 = self._gate("write", self._logits("write", switches.write, source, divisor), 2)
        if switches.mix == "none":
            return x_BxTxD, (s_BxTxNx1, None)
        out = ops.project(ops.flatten(normed_BxTxNxD), self.w_res[...], self.dtype)
        return x_BxTxD, (s_BxTxNx1, self._mixing(out))

    def write(self, stream_BxTxNxD, y_BxTxD, gates):
        s_BxTxNx1, h_BxTxNxN = gates
        new_BxTxNxD = ops.write(stream_BxTxNxD, s_BxTxNx1, y_BxTxD, h_BxTxNxN)
        if not self.float8:
            return new_BxTxNxD
        return float8.store(new_BxTxNxD, float8.noise(stream_BxTxNxD, self.k[...]) if hasattr(self, "k") else None)


class GatedResidual(Residual, kind="gr"):
    """Streams [B, T, N, D]: n copies of the embedding at the start, one more read (`final`) at the end."""

    has_float8 = True

    @dataclasses.dataclass(frozen=True)
    class Switches:
        streams: int = 4
        rank: int = 8  # of the gates on channels; the report uses d / 8
        read: Literal["channel", "scalar"] = "channel"
        write: Literal["scalar", "channel"] = "scalar"
        gates: Literal["dynamic", "static"] = "dynamic"
        gate: Literal["sigmoid", "tanh"] = "sigmoid"
        gate_range: Literal[1, 2] = 1  # of a sigmoid read gate: (0, 1) as published, or (0, 2)
        mix: Literal["none", "free", "sinkhorn", "permutations"] = "none"
        norm: Literal["per_stream", "shared_gain", "joint"] = "per_stream"
        gate_input: Literal["all", "last", "pooled"] = "all"
        static_term: bool = False
        top_k: int = 0  # streams read; 0: all
        init_std: float = 0.02  # of all projections; as published, for d = 2560
        rounding: Literal["stochastic", "nearest"] = "stochastic"  # of streams stored in float8_e4m3fn

    def __init__(self, switches: Switches, frame: Frame, key: jax.Array):
        if switches.streams < self.min_streams:
            raise errors.UsageError("residual.streams", switches.streams, "GR needs at least 2; n = 1 is GatedNorm")
        errors.positive("residual.rank", switches.rank)
        errors.positive("residual.init_std", switches.init_std)
        if not 0 <= switches.top_k <= switches.streams:
            raise errors.UsageError("residual.top_k", switches.top_k, f"must lie in 0 .. streams={switches.streams}")
        if switches.static_term and switches.gates == "static":
            raise errors.UsageError("residual.static_term", True, "gates=static has this term alone: leave it false")
        if switches.gates == "static" and switches.gate_input != "all":
            raise errors.UsageError(
                "residual.gate_input", switches.gate_input, "gates=static have no input: leave it all"
            )
        if switches.mix == "permutations":
            check_permutations(switches.streams)
        if frame.gated_norm:
            raise errors.UsageError("residual.gated_norm", frame.gated_norm, "GR's read is a gated norm: leave it 0")
        if switches.gate == "tanh" and switches.gate_range != 1:
            raise errors.UsageError("residual.gate_range", switches.gate_range, "applies to gate=sigmoid alone")
        self.switches = switches
        self.frame = frame
        self.keeps_equal_streams = switches.mix != "free"  # its rows sum to what they learn
        if switches.mix in ("sinkhorn", "permutations"):  # which leave streams that are copies as they are
            self.asleep_at_start = frozenset({"b_res", "w_res", "alpha_res"})
        self.final = GatedSite(switches, frame, frame.sites, fold(key, "final"), writes=False)

    def site(self, k, key):
        return GatedSite(self.switches, self.frame, k, key)

    def expand(self, x_BxTxD):
        x_BxTxD = x_BxTxD.astype(self.frame.stream_dtype)
        x_BxTxD = float8.store(x_BxTxD, None) if self.frame.float8 else x_BxTxD
        return ops.repeat(x_BxTxD, self.switches.streams)

    @property
    def n_streams(self):
        return self.switches.streams

    def add(self, stream_BxTxNxD, f):
        new_BxTxNxD = ops.add(stream_BxTxNxD, f)
        if not self.frame.float8:
            return new_BxTxNxD
        stochastic = self.switches.rounding == "stochastic"  # sites count below frame.sites
        return float8.store(new_BxTxNxD, float8.noise(stream_BxTxNxD, self.frame.sites) if stochastic else None)

    def unwritten(self, stream_BxTxNxD):
        if not self.final.joins:
            return None
        *lead, n, d = stream_BxTxNxD.shape
        return jnp.zeros((*lead, d), self.frame.compute_dtype), (jnp.zeros((*lead, n, 1)), None)

    def pack(self, stream_BxTxNxD):
        return float8.pack(stream_BxTxNxD) if self.frame.float8 else stream_BxTxNxD

    def unpack(self, packed):
        return float8.unpack(packed) if self.frame.float8 else packed

    def collapse(self, stream_BxTxNxD):
        return self.final.read(stream_BxTxNxD)[0]
