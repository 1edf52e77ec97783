"""Attention Residuals (AttnRes), full and block: a sublayer attends over the outputs before it. arXiv 2603.15031."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from grlab import errors
from grlab.ops import streams as ops
from grlab.params import constant, fixed, fold
from grlab.residual.stream import Frame, Norm, Residual, Site


def own_source(k, block: int):
    """The source that sublayer k adds to; source 0 is the embedding."""
    return 1 + k // block


class DepthAttention(nnx.Module):
    """x = Σ_i softmax_i(q · RMSNorm(source_i)) source_i over the sources there are, then a norm.

    q starts at 0: the mean of the sources. The norm of the keys has a gain of its own.
    """

    def __init__(self, frame: Frame, key: jax.Array):
        self.q = constant(jnp.zeros(frame.width), ("embed",))
        self.source_gain = constant(jnp.zeros(frame.width), ("embed",))
        self.eps = frame.norm_eps
        self.norm = Norm(frame, key)

    def __call__(self, sources_BxTxMxD, last):
        """The normed read [B, T, D] of the sources 0 .. `last`."""
        # q · (source / rms ⊙ (1 + gain)) as (q ⊙ (1 + gain)) · source / rms, so that no keys are made.
        sources_BxTxMxD = sources_BxTxMxD.astype(ops.F32)
        q_Dx1 = (self.q[...] * (1 + self.source_gain[...]))[:, None]
        rms_BxTxM = jnp.sqrt(jnp.mean(jnp.square(sources_BxTxMxD), axis=-1) + self.eps)
        logits_BxTxM = ops.project(sources_BxTxMxD, q_Dx1, ops.F32)[..., 0] / rms_BxTxM
        there_M = jnp.arange(logits_BxTxM.shape[-1]) <= last
        weights_BxTxM = jax.nn.softmax(jnp.where(there_M, logits_BxTxM, -jnp.inf), axis=-1)
        # A product: faster for many sources than `ops.combine`, which is faster for few streams.
        return self.norm(jnp.einsum("...m,...md->...d", weights_BxTxM, sources_BxTxMxD, precision=ops.EXACT))


class AttentionResidualSite(Site):
    """The read of sublayer k over the embedding and what the sublayers before it wrote; its output goes to its block.

    Blocks are of S sites. The sources are the embedding, the sum of each finished block, and the sum of what the
    current block has so far, if anything. S = 1 is full AttnRes: every output is a source of its own.
    """

    def __init__(self, switches: "AttentionResiduals.Switches", frame: Frame, k, key: jax.Array):
        self.attend = DepthAttention(frame, key)
        self.own = fixed(own_source(k, switches.block))
        self.last = fixed(-(-k // switches.block))  # the last source that has anything in it

    def read(self, stream_BxTxMxD):
        return self.attend(stream_BxTxMxD, self.last[...]), None

    def write(self, stream_BxTxMxD, y_BxTxD, gates):
        own = self.own[...].astype(jnp.int32)
        sum_BxTxD = jax.lax.dynamic_index_in_dim(stream_BxTxMxD, own, axis=-2, keepdims=False).astype(ops.F32)
        sum_BxTxD = (sum_BxTxD + y_BxTxD.astype(ops.F32)).astype(stream_BxTxMxD.dtype)
        return jax.lax.dynamic_update_index_in_dim(stream_BxTxMxD, sum_BxTxD, own, axis=stream_BxTxMxD.ndim - 2)


class AttentionResiduals(Residual, kind="attnres"):
    """Sources [B, T, M, D], M = 1 + ⌈sites / S⌉, the embedding first; the end is one more read, over all of them."""

    # source_gain multiplies q, which is 0. The first site has one source, so that its q has no gradient for ever.
    asleep_at_start = frozenset({"source_gain", "q"})

    @dataclasses.dataclass(frozen=True)
    class Switches:
        block: int = 1  # S, sites a block; 1: full

    def __init__(self, switches: Switches, frame: Frame, key: jax.Array):
        errors.positive("residual.block", switches.block)
        self.switches = switches
        self.frame = frame
        self.blocks = -(-frame.sites // switches.block)
        self.final = DepthAttention(frame, fold(key, "final"))

    def site(self, k, key):
        return AttentionResidualSite(self.switches, self.frame, k, key)

    def expand(self, x_BxTxD):
        x_BxTx1xD = x_BxTxD.astype(self.frame.stream_dtype)[..., None, :]
        return jnp.pad(x_BxTx1xD, [(0, 0)] * (x_BxTxD.ndim - 1) + [(0, self.blocks), (0, 0)])

    def add(self, stream_BxTxMxD, f):
        """f of the embedding is added to the embedding: an embedding, too, and no sublayer's output."""
        return stream_BxTxMxD.at[..., :1, :].set(ops.add(stream_BxTxMxD[..., :1, :], f))

    def keep(self, packed, k):
        """The sum that the current block has so far: what is written later is all that is added to the sources."""
        return jax.lax.dynamic_index_in_dim(packed, own_source(k, self.switches.block), axis=-2, keepdims=False)

    def recall(self, kept, after, k):
        own = own_source(k, self.switches.block)
        finished_Mx1 = (jnp.arange(after.shape[-2]) < own)[:, None]
        before = jnp.where(finished_Mx1, after, jnp.zeros((), after.dtype))
        return jax.lax.dynamic_update_index_in_dim(before, kept, own, axis=after.ndim - 2)

    def collapse(self, stream_BxTxMxD):
        return self.final(stream_BxTxMxD, self.blocks)
