"""The n-gram embedding: what a token's last few tokens look up in hashed tables, added to every stream.

As transformers' `qwen4_exp` has it, where it is called per-layer embedding (report on GR, arXiv 2608.30320, section
2.3; after Engram, arXiv 2601.07372). Dimensions: B batch, T time, D width, N streams, E channels looked up, W heads.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from grlab import errors
from grlab.layers.gated_delta_net import short_convolution
from grlab.ops import streams as ops
from grlab.params import constant, normal


class NGramEmbedding(nnx.Module):
    """Added to each stream R_i:

        u_i = σ(√|s_i| sign s_i) v,   u_i + SiLU(conv(norm(u_i)));   s_i = norm(W_k e)_i · norm(R_i) / √D,   v = W_v e

    e is one row for each head, `heads` of them for each n-gram from 2 to `size`. The convolution is causal, a filter a
    channel, its taps `size` tokens apart, and starts at zero. The norms are RMSNorms with a gain for each stream.
    """

    def __init__(self, config, vocab: int, streams: int, index: int, separator: int, dtype: jnp.dtype, key: jax.Array):
        """`index` counts the model's n-gram embeddings: each has hashes and tables of its own."""
        ngram, d = config.ngram, config.width
        self.size, self.separator, self.eps, self.dtype = ngram.size, separator, config.norm_eps, dtype
        self.rows = table_rows(ngram, index)
        self.multipliers = multipliers(vocab, ngram.size, index, ngram.seed)
        heads = len(self.rows)
        rows = table_height(ngram, index)
        e = ngram.width
        # Without weight decay, which would wear off the rows that are seldom looked up (report, section 3.1).
        self.table = normal(
            key, "table", (rows, e // heads), ("ngram", ""), config.embed_std, decay=False, share=heads / rows
        )
        self.key = normal(key, "key", (e, streams * d), ("", "flat"), e**-0.5, muon=(-2, -1))
        self.value = normal(key, "value", (e, d), ("", "embed"), e**-0.5, muon=(-2, -1))
        for name in ("key_gain", "stream_gain", "conv_gain"):
            setattr(self, name, constant(jnp.zeros((streams, d)), ("streams", "embed")))
        self.conv = constant(jnp.zeros((ngram.conv, streams, d)), ("rank", "streams", "embed"))

    def __call__(self, streams_BxTxNxD: jax.Array, tokens_BxT: jax.Array, documents_BxT=None) -> jax.Array:
        """What is added to the streams: [B, T, N, D] in float32."""
        rows_BxTxW = hashed_rows(tokens_BxT, self.separator, self.multipliers, self.rows, documents_BxT)
        e_BxTxE = self.table[...][rows_BxTxW].reshape(*tokens_BxT.shape, -1)
        key_BxTxND = ops.project(e_BxTxE, self.key[...], self.dtype)
        key_BxTxNxD = ops.rms_norm(key_BxTxND.reshape(streams_BxTxNxD.shape), self.key_gain[...], self.eps)
        query_BxTxNxD = ops.rms_norm(streams_BxTxNxD, self.stream_gain[...], self.eps)
        d = streams_BxTxNxD.shape[-1]
        s_BxTxNx1 = jnp.sum(key_BxTxNxD * query_BxTxNxD, axis=-1, keepdims=True) * d**-0.5
        gate_BxTxNx1 = jax.nn.sigmoid(jnp.sign(s_BxTxNx1) * jnp.sqrt(jnp.maximum(jnp.abs(s_BxTxNx1), 1e-6)))
        value_BxTx1xD = ops.project(e_BxTxE, self.value[...], self.dtype)[..., None, :]
        gated_BxTxNxD = gate_BxTxNx1 * value_BxTx1xD
        normed_BxTxNxD = ops.rms_norm(gated_BxTxNxD, self.conv_gain[...], self.eps)
        local_BxTxNxD = short_convolution(normed_BxTxNxD, self.conv[...], documents_BxT, dilation=self.size)
        return gated_BxTxNxD + jax.nn.silu(local_BxTxNxD)


def layers_of(config) -> list[int]:
    """The layers, from 0 on, that have an n-gram embedding; UsageError for fields that cannot be."""
    ngram = config.ngram
    try:
        layers = [int(layer) for layer in ngram.layers.split(",") if layer.strip()]
    except ValueError:
        layers = [0]
    if layers != sorted(set(layers)) or any(not 1 <= layer <= config.layers for layer in layers):
        remedy = f"layers from 1 to {config.layers} in order, separated by commas; none: ''"
        raise errors.UsageError("model.ngram.layers", ngram.layers, remedy)
    if layers:
        for name in ("heads", "width", "rows", "multiple", "conv"):
            errors.positive(f"model.ngram.{name}", ngram[name])
        if ngram.size < 2:
            raise errors.UsageError("model.ngram.size", ngram.size, "at least 2: an n-gram of one is a token")
        if ngram.width % ((ngram.size - 1) * ngram.heads):
            remedy = f"must be a multiple of the {(ngram.size - 1) * ngram.heads} heads of all sizes"
            raise errors.UsageError("model.ngram.width", ngram.width, remedy)
    return [layer - 1 for layer in layers]


def table_rows(ngram, index: int) -> tuple[int, ...]:
    """The rows of each head's table: the next primes from `ngram.rows` on, none used twice in a model."""
    heads = (ngram.size - 1) * ngram.heads
    primes, candidate = [], ngram.rows
    while len(primes) < (index + 1) * heads:
        if candidate > 1 and all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            primes.append(candidate)
        candidate += 1
    return tuple(primes[index * heads :])


def table_height(ngram, index: int) -> int:
    """The rows of all heads' tables together, filled up to a multiple of `ngram.multiple`."""
    return -(-sum(table_rows(ngram, index)) // ngram.multiple) * ngram.multiple


def multipliers(vocab: int, size: int, index: int, seed: int) -> tuple[int, ...]:
    """An odd multiplier for each place of an n-gram, below 2⁶³ / vocab; by SplitMix64 of the seed (transformers')."""
    half = max(1, (2**63 - 1) // vocab // 2)
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15
    out = []
    for place in range(size):
        x = seed + 10007 * index + golden * (place + 2) & mask  # the generator adds another golden before it mixes
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        out.append(2 * ((x ^ x >> 31) % half) + 1)
    return tuple(out)


def hashed_rows(
    tokens_BxT, separator: int, multipliers: tuple[int, ...], rows: tuple[int, ...], documents_BxT=None
) -> jax.Array:
    """The row of the joint table that each head looks up: [B, T, W] int32, the heads of 2-grams first.

    An n-gram's hash is the exclusive or of token · multiplier over its places, in 64 bits, modulo the head's rows. A
    separator, and the start, end an n-gram: what lies before is taken as separators. The separator itself still looks
    back, unless `documents_BxT` has it begin a document.
    """
    t = tokens_BxT.shape[1]
    size = len(multipliers)
    heads = len(rows) // (size - 1)
    token_T = jnp.arange(t)
    ended_BxT = jax.lax.cummax(jnp.where(tokens_BxT == separator, token_T, -1), axis=1)
    ended_BxT = jnp.pad(ended_BxT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)  # the last separator before each token
    offsets = np.cumsum([0, *rows[:-1]])
    high, low = _times(tokens_BxT, multipliers[0])
    found = []
    for back in range(1, size):
        earlier_BxT = jnp.pad(tokens_BxT[:, : max(t - back, 0)], ((0, 0), (min(back, t), 0)))
        known_BxT = token_T - back > ended_BxT
        if documents_BxT is not None:
            known_BxT &= documents_BxT == jnp.pad(documents_BxT[:, : max(t - back, 0)], ((0, 0), (min(back, t), 0)))
        earlier_BxT = jnp.where(known_BxT, earlier_BxT, separator)
        high, low = (a ^ b for a, b in zip((high, low), _times(earlier_BxT, multipliers[back]), strict=True))
        for head in range((back - 1) * heads, back * heads):
            found.append(_modulo(high, low, rows[head]) + offsets[head])
    return jnp.stack(found, axis=-1).astype(jnp.int32)


# 64-bit arithmetic in pairs of 32-bit words, since JAX has no 64-bit integers unless the whole program has them.


def _times(x: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """(high, low) words of x · m for 0 <= x < 2³¹, below 2⁶⁴."""
    x = x.astype(jnp.uint32)
    x0, x1 = x & 0xFFFF, x >> 16
    high, low = jnp.zeros_like(x), jnp.zeros_like(x)
    for place in range(4):  # 16 bits of m at a time
        part = jnp.uint32(m >> 16 * place & 0xFFFF)
        for shift, product in ((16 * place, x0 * part), (16 * place + 16, x1 * part)):
            if shift < 32:
                shifted = product << shift
                low = low + shifted
                high = high + (low < shifted) + (product >> 32 - shift if shift else jnp.uint32(0))
            elif shift < 64:
                high = high + (product << shift - 32)
    return high, low


def _modulo(high: jax.Array, low: jax.Array, m: int) -> jax.Array:
    """The remainder of a 64-bit number by m < 2³¹, as many bits at a time as leave room for it."""
    step = 32 - m.bit_length()
    remainder = jnp.zeros_like(high)
    for word in (high, low):
        for place in range(32, 0, -step):
            bits = min(step, place)
            part = word >> place - bits & (1 << bits) - 1
            remainder = ((remainder << bits) | part) % m
    return remainder
