"""Qwen Sparse Attention (QSA): an indexer chooses the blocks of tokens that attention looks at.

"On the Design of Qwen3.8-Next Architecture", arXiv 2608.30320, eq. 12-20. Dimensions: B batch, T time, Q queries of one
piece, D width, H query heads, K key-value heads, C channels of a head, I heads and E channels of the indexer, S blocks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from grlab import errors
from grlab.layers.attention import Attention, rope, turned
from grlab.ops import streams as ops
from grlab.ops.remat import keep
from grlab.params import constant, fold, normal

PIECE = 256  # queries worked on at a time, so that no array is T by T


class Blocks(NamedTuple):
    """The complete blocks of r tokens, each counted from the start of its document.

    There is room for all, and for one at least: S = max(⌊T / r⌋, 1).

    A token's `slot` is that of its block, S or another block's where its own is never complete.
    """

    first_BxS: jax.Array  # the first token
    last_BxS: jax.Array  # the last token; T where there is no such block
    slot_BxT: jax.Array
    place_BxT: jax.Array  # of a token in its document


def blocks(documents_BxT: jax.Array, r: int) -> Blocks:
    """The blocks of each document."""
    b, t = documents_BxT.shape
    token_T = jnp.arange(t)
    starts_BxT = jnp.pad(documents_BxT[:, 1:] != documents_BxT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    place_BxT = token_T - jax.lax.cummax(jnp.where(starts_BxT, token_T, 0), axis=1)
    ends_BxT = place_BxT % r == r - 1
    last_BxS = jax.vmap(lambda ends_T: jnp.nonzero(ends_T, size=max(t // r, 1), fill_value=t)[0])(ends_BxT)
    return Blocks(last_BxS - r + 1, last_BxS, jnp.cumsum(ends_BxT, axis=1) - ends_BxT, place_BxT)


class Indexer(nnx.Module):
    """A block's score for a query: Σ_h ReLU(q_h · k̄) / √E, with k̄ the mean of the block's keys, normed (eq. 12-15).

    Queries and mean keys are normed per head; RoPE turns as many of their channels as of attention's, a block's key by
    its first token's place. The report's eq. 15 has no 1/√E; transformers' `qwen4_exp` has it, and so it is here: it
    changes nothing but how sharp the softmax of the distillation starts.
    """

    def __init__(self, config, dtype: jnp.dtype, key: jax.Array):
        d, i, e = config.width, config.qsa.heads, config.qsa.head_dim
        self.theta, self.turned, self.eps, self.dtype = config.rope_theta, turned(config), config.norm_eps, dtype
        self.query = normal(key, "query", (d, i, e), ("embed", "", "channel"), d**-0.5)
        self.key = normal(key, "key", (d, e), ("embed", "channel"), d**-0.5)
        self.query_gain = constant(jnp.zeros(e), ("channel",))
        self.key_gain = constant(jnp.zeros(e), ("channel",))

    def queries(self, x_BxTxD: jax.Array) -> jax.Array:
        """[B, T, I, E] in float32."""
        d, i, e = self.query.shape
        q_BxTxIxE = ops.project(x_BxTxD, self.query[...].reshape(d, i * e), self.dtype)
        q_BxTxIxE = ops.rms_norm(q_BxTxIxE.reshape(*x_BxTxD.shape[:2], i, e), self.query_gain[...], self.eps)
        return rope(q_BxTxIxE, self.theta, self.turned)

    def keys(self, x_BxTxD: jax.Array, first_BxS: jax.Array, r: int) -> jax.Array:
        """The keys [B, S, E] of the blocks that begin at `first_BxS`, in float32."""
        k_BxTxE = ops.project(x_BxTxD, self.key[...], self.dtype)
        mean_BxSxE = jnp.mean(jax.vmap(_take)(k_BxTxE, first_BxS[..., None] + jnp.arange(r)), axis=2)
        k_BxSxE = ops.rms_norm(mean_BxSxE, self.key_gain[...], self.eps)
        return rope(k_BxSxE[:, :, None], self.theta, self.turned, first_BxS)[:, :, 0]


class SparseAttention(Attention):
    """Attention over the `budget` tokens in the blocks that score highest, and those after the last complete block.

    A block is scored once it is complete, also by the query that completes it. As long as the budget covers what a
    query can see, it is attention. The indexer sees its input without a gradient; it learns from `index_kl` alone: the
    divergence of the softmax of its scores from attention's own distribution, summed over heads, the largest in each
    block, made to sum to 1; over the chosen blocks (eq. 20), which are all complete ones while the budget covers them
    (eq. 17-18).

    Attention is masked, not gathered: the function of sparse attention at the cost of a dense one.
    """

    def __init__(self, config, dtype: jnp.dtype, initial_std, key: jax.Array):
        super().__init__(config, dtype, initial_std, key)
        self.r, self.chosen = config.qsa.block, config.qsa.budget // config.qsa.block
        self.indexer = Indexer(config, dtype, fold(key, "indexer"))

    @staticmethod
    def check(config) -> None:
        """Raises UsageError for fields that cannot be."""
        Attention.check(config)
        qsa = config.qsa
        for name in ("heads", "head_dim", "block", "budget"):
            errors.positive(f"model.qsa.{name}", qsa[name])
        if qsa.budget % qsa.block:
            remedy = f"must be a multiple of model.qsa.block={qsa.block}"
            raise errors.UsageError("model.qsa.budget", qsa.budget, remedy)
        if qsa.head_dim < turned(config):
            remedy = f"at least the {turned(config)} channels of attention's heads that RoPE turns"
            raise errors.UsageError("model.qsa.head_dim", qsa.head_dim, remedy)

    def __call__(self, x_BxTxD: jax.Array, documents_BxT: jax.Array | None = None):
        """(y [B, T, D], {"index_kl": the indexer's loss in nats a query}); documents as in `Attention`."""
        b, t, _ = x_BxTxD.shape
        if documents_BxT is None:
            documents_BxT = jnp.zeros((b, t), jnp.int32)
        q_BxTxHxC, k_BxTxKxC, v_BxTxKxC = self.heads(x_BxTxD)
        of_batch = blocks(documents_BxT, self.r)
        detached_BxTxD = jax.lax.stop_gradient(x_BxTxD)
        index_BxSxE = self.indexer.keys(detached_BxTxD, of_batch.first_BxS, self.r)

        def attend(piece):
            return self._attend(*piece, k_BxTxKxC, v_BxTxKxC, index_BxSxE, documents_BxT, of_batch)

        queries = (q_BxTxHxC, self.indexer.queries(detached_BxTxD), jnp.broadcast_to(jnp.arange(t), (b, t)))
        if t <= PIECE:
            out_BxTxHxC, kl_BxT = attend(queries)
        else:
            pieces = -(-t // PIECE)
            padding = pieces * PIECE - t

            def cut(x):  # [B, T, ..] -> [pieces, B, Q, ..]; what is padded repeats the last query
                x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), mode="edge")
                return jnp.moveaxis(x.reshape(b, pieces, PIECE, *x.shape[2:]), 1, 0)

            joined = jax.lax.map(jax.checkpoint(attend), jax.tree.map(cut, queries))
            out_BxTxHxC, kl_BxT = (
                jnp.moveaxis(x, 0, 1).reshape(b, pieces * PIECE, *x.shape[3:])[:, :t] for x in joined
            )
        return self.project(x_BxTxD, keep(out_BxTxHxC.astype(self.dtype))), {"index_kl": jnp.mean(kl_BxT)}

    def _attend(self, q_BxQxHxC, index_BxQxIxE, i_BxQ, k_BxTxKxC, v_BxTxKxC, index_BxSxE, documents_BxT, of_batch):
        """The heads' outputs [B, Q, H, C] of the queries at the tokens `i_BxQ`, and the indexer's loss [B, Q]."""
        b, queries, h, c = q_BxQxHxC.shape
        t, kv = k_BxTxKxC.shape[1:3]
        token_T = jnp.arange(t)
        same_BxQxT = jax.vmap(_take)(documents_BxT, i_BxQ)[..., None] == documents_BxT[:, None]
        same_BxQxT &= token_T <= i_BxQ[..., None]

        similarity = jnp.einsum("bqie,bse->bqis", index_BxQxIxE, index_BxSxE, precision=ops.EXACT)
        score_BxQxS = jnp.sum(jax.nn.relu(similarity), axis=2) * index_BxSxE.shape[-1] ** -0.5
        first_BxS, last_BxS = of_batch.first_BxS, of_batch.last_BxS
        seen_BxQxS = (last_BxS[:, None] <= i_BxQ[..., None]) & _gather(same_BxQxT, first_BxS)
        chosen_BxQxS = self._choose(score_BxQxS, seen_BxQxS)

        # Of the query's document: what is in a chosen block, and what comes after the last complete block.
        place_BxQ = jax.vmap(_take)(of_batch.place_BxT, i_BxQ)
        complete_BxQ = (place_BxQ + 1) // self.r * self.r
        tail_BxQxT = of_batch.place_BxT[:, None] >= complete_BxQ[..., None]
        mask_BxQxT = same_BxQxT & (tail_BxQxT | _gather(chosen_BxQxS, of_batch.slot_BxT))

        q_BxQxKxGxC = q_BxQxHxC.reshape(b, queries, kv, h // kv, c)
        logits = jnp.einsum("bqkgc,btkc->bkgqt", q_BxQxKxGxC, k_BxTxKxC, preferred_element_type=ops.F32)
        logits = jnp.where(mask_BxQxT[:, None, None], logits * c**-0.5, -jnp.inf)
        weights_BxKxGxQxT = jax.nn.softmax(logits, axis=-1)
        out_BxQxHxC = jnp.einsum("bkgqt,btkc->bqkgc", weights_BxKxGxQxT.astype(v_BxTxKxC.dtype), v_BxTxKxC)

        teacher_BxQxT = jax.lax.stop_gradient(jnp.sum(weights_BxKxGxQxT, axis=(1, 2)))
        inside = (first_BxS[..., None] + jnp.arange(self.r)).reshape(b, -1)
        teacher_BxQxS = jnp.max(_gather(teacher_BxQxT, inside).reshape(b, queries, -1, self.r), axis=-1, initial=0.0)
        return out_BxQxHxC.reshape(q_BxQxHxC.shape), divergence(teacher_BxQxS, score_BxQxS, chosen_BxQxS)

    def _choose(self, score_BxQxS, seen_BxQxS):
        """Which blocks a query looks at: all it has seen, or the `chosen` of the highest score, the earlier first."""
        s = score_BxQxS.shape[-1]
        if s <= self.chosen:
            return seen_BxQxS
        best_BxQxN = jax.lax.top_k(jnp.where(seen_BxQxS, score_BxQxS, -jnp.inf), self.chosen)[1]
        best_BxQxS = jnp.any(best_BxQxN[..., None] == jnp.arange(s), axis=-2)
        return best_BxQxS & seen_BxQxS


def divergence(teacher_BxQxS: jax.Array, score_BxQxS: jax.Array, support_BxQxS: jax.Array) -> jax.Array:
    """KL(teacher, made to sum to 1 over the support ‖ softmax of the scores over it), [B, Q]; 0 where it is empty."""
    teacher_BxQxS = jnp.where(support_BxQxS, teacher_BxQxS, 0.0)
    total_BxQx1 = jnp.sum(teacher_BxQxS, axis=-1, keepdims=True)
    teacher_BxQxS = teacher_BxQxS / jnp.where(total_BxQx1 > 0, total_BxQx1, 1.0)
    # A floor and no -inf: where nothing is in the support, the softmax is of equal scores, and the teacher is zero.
    student_BxQxS = jax.nn.log_softmax(jnp.where(support_BxQxS, score_BxQxS, -1e30), axis=-1)
    entropy_BxQxS = teacher_BxQxS * jnp.log(jnp.where(teacher_BxQxS > 0, teacher_BxQxS, 1.0))
    return jnp.sum(entropy_BxQxS - jnp.where(teacher_BxQxS > 0, teacher_BxQxS * student_BxQxS, 0.0), axis=-1)


def _take(x_Tx_: jax.Array, index: jax.Array) -> jax.Array:
    """x[index], zeros where the index is out of range."""
    return jnp.take(x_Tx_, index, axis=0, mode="fill", fill_value=0)


def _gather(x_BxQxT: jax.Array, index_BxS: jax.Array) -> jax.Array:
    """x[b, q, index[b, s]], zeros where the index is out of range: [B, Q, S]."""
    take = jax.vmap(lambda x_QxT, index_S: jnp.take(x_QxT, index_S, axis=1, mode="fill", fill_value=0))
    return take(x_BxQxT, index_BxS)
