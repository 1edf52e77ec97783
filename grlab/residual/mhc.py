"""Manifold-constrained Hyper-Connections (mHC): doubly stochastic mixing. arXiv 2512.24880 v2.

And two relatives that differ in the projection: DeepSeek-V4's form and mHC-lite (arXiv 2601.05732).
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from grlab import errors
from grlab.ops import manifold
from grlab.ops import streams as ops
from grlab.ops.mesh import whole
from grlab.params import constant, fold, normal
from grlab.residual.stream import Frame, Norm, Site, SummedStreams, check_permutations, home, near_identity

V4_EPS = 1e-6  # DeepSeek-V4's hc_eps: on the gates, on the softmax and in every Sinkhorn denominator


class ManifoldSite(Site):
    """One manifold-constrained connection   (mHC, eq. 5-9).

        x̂ = RMSNorm(vec R), no gain;   H̃ = α ⊙ (x̂ φ) + b
        H_pre = σ(H̃_pre);   H_post = 2σ(H̃_post);   H_res = Sinkhorn-Knopp(exp H̃_res)
        x = norm(Σ_i H_pre,i R_i);   R' = H_res R + H_postᵀ y

    Static: α = 0, only b is learned. (The report on GR, eq. 26-28, writes the static term of every system outside the
    squashing; this is mHC's own paper, which has it inside.) φ and b have no published initial values. Chosen here:
    φ ~ N(0, 0.02), and the identity-like b of public ports: b_pre ±3 (+ on the home stream k mod n), b_post 0, b_res
    6 I − 3. The DeepSeek-V4 form has other formulas and the same start (transformers' is α = 1, b = 0, which averages
    the streams at once).

    mHC-lite (form=lite): H_res = Σ_p softmax(H̃_res)_p P_p over the n! permutation matrices, exactly doubly stochastic.
    Its b is 0 for the identity and −8 for the others at n = 4 (chosen here: as near the identity as 6 I − 3).
    """

    def __init__(self, switches: "ManifoldHyperConnections.Switches", frame: Frame, k, key: jax.Array):
        n, d = switches.streams, frame.width
        self.switches = switches
        self.eps = frame.norm_eps
        self.v4_eps = V4_EPS if switches.form == "deepseek_v4" else None
        self.norm = Norm(frame, key)
        self.b_pre = constant(home(k, n, 3.0, -3.0), ("streams",))
        self.b_post = constant(jnp.zeros(n), ("streams",))
        if switches.form == "lite":
            self.b_res = constant(near_identity(n), ("streams",))
        else:
            self.b_res = constant(6.0 * jnp.eye(n) - 3.0, ("streams", "streams"))
        if switches.dynamic:
            for name, columns in (("pre", n), ("post", n), ("res", self.b_res.size)):
                phi = normal(key, f"phi_{name}", (n * d, columns), ("flat", "streams"), std=0.02)
                setattr(self, f"phi_{name}", phi)
                setattr(self, f"alpha_{name}", constant(0.01))

    def _projections(self):
        """(φ [N·D, O], α [O])."""
        phi = jnp.concatenate([self.phi_pre[...], self.phi_post[...], self.phi_res[...]], axis=1)
        alphas = jnp.stack([self.alpha_pre[...], self.alpha_post[...], self.alpha_res[...]])
        sizes = np.array([self.b_pre.size, self.b_post.size, self.b_res.size])
        return phi, jnp.repeat(alphas, sizes, total_repeat_length=phi.shape[1])

    def _static(self):
        """b [O]."""
        return jnp.concatenate([self.b_pre[...], self.b_post[...], self.b_res[...].reshape(-1)])

    def maps(self, stream_BxTxNxD):
        """(H_pre [.., N], H_post [.., N], H_res [.., N, N]) in float32."""
        n, logits = self.switches.streams, whole(self._static())
        if self.switches.dynamic:
            logits = manifold.logits(stream_BxTxNxD, *self._projections(), logits, self.eps)
        if self.switches.form == "lite":
            pre_N, post_N, res = logits[..., :n], logits[..., n : 2 * n], logits[..., 2 * n :]
            return jax.nn.sigmoid(pre_N), 2 * jax.nn.sigmoid(post_N), ops.permutation_mixture(res, n)
        maps = manifold.maps(logits, n, self.switches.iterations, self.v4_eps)
        return maps if self.switches.dynamic else whole(maps)

    def read(self, stream_BxTxNxD):
        if not self.switches.dynamic or self.switches.form == "lite":
            pre_N, post_N, res_NxN = self.maps(stream_BxTxNxD)
            return self.norm(ops.combine(pre_N, stream_BxTxNxD)), (post_N, res_NxN)
        dtype = jnp.dtype(ops.F32 if self.norm.gated else self.norm.dtype)
        settings = manifold.Settings(self.eps, self.norm.eps, self.switches.iterations, self.v4_eps, dtype)
        weights = (*self._projections(), self._static(), self.norm.gain[...])
        x_BxTxD, post_BxTxN, res_BxTxNxN = manifold.read(stream_BxTxNxD, *weights, settings)
        return self.norm.gate(x_BxTxD).astype(self.norm.dtype), (post_BxTxN, res_BxTxNxN)

    def write(self, stream_BxTxNxD, y_BxTxD, gates):
        post_N, res_NxN = gates
        return ops.write(stream_BxTxNxD, post_N[..., None], y_BxTxD, res_NxN)


class ManifoldHyperConnections(SummedStreams, kind="mhc"):
    """Streams [B, T, N, D]: n copies of the embedding at the start.

    The paper does not say how the streams end. Here: its form and mHC-lite sum them, as HC does; the DeepSeek-V4 form
    weighs them by a learned head, σ(α (x̂ φ) + b) + eps. The final norm follows.
    """

    # The streams start as copies and are first written alike (b_post 0). Until an update has made them differ, a mixing
    # keeps them as they are, and a read only scales them, which the norm after it undoes: neither has a gradient.
    asleep_at_start = frozenset(
        {"b_res", "phi_res", "alpha_res", "b_pre", "phi_pre", "alpha_pre", "head_b", "phi_head", "head_alpha"}
    )

    @dataclasses.dataclass(frozen=True)
    class Switches:
        streams: int = 4
        dynamic: bool = True
        form: Literal["paper", "deepseek_v4", "lite"] = "paper"
        iterations: int = 20  # of Sinkhorn-Knopp; form=lite has none

    def __init__(self, switches: Switches, frame: Frame, key: jax.Array):
        super().__init__(switches, frame, key)
        errors.positive("residual.iterations", switches.iterations)
        if switches.form == "lite":
            check_permutations(switches.streams)
        n, d = switches.streams, frame.width
        self.learned_head = switches.form == "deepseek_v4"
        if self.learned_head:
            self.phi_head = normal(key, "phi_head", (n * d, n), ("flat", "streams"), std=0.02)
            self.head_alpha = constant(1.0)  # the head starts as transformers' does: half of each stream
            self.head_b = constant(jnp.zeros(n), ("streams",))
            self.final_norm = Norm(frame, fold(key, "final_norm"))  # its eps is not scaled: as transformers'

    def site(self, k, key):
        return ManifoldSite(self.switches, self.frame, k, key)

    def collapse(self, stream_BxTxNxD):
        if not self.learned_head:
            return super().collapse(stream_BxTxNxD)
        out_BxTxN = ops.rms_project(ops.flatten(stream_BxTxNxD), self.phi_head[...], self.frame.norm_eps)
        weights_BxTxN = jax.nn.sigmoid(self.head_alpha[...] * out_BxTxN + self.head_b[...]) + V4_EPS
        return self.final_norm(ops.combine(weights_BxTxN, stream_BxTxNxD))
