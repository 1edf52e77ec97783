"""Causal self-attention with grouped queries, QK-norm and RoPE.

Dimensions: B batch, T time, D width, H query heads, K key-value heads, C channels of a head.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from grlab.ops import streams as ops
from grlab.params import constant, normal


def rope(x_BxTxHxC: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (arXiv 2104.09864): channel c turns with channel c + C/2, in float32."""
    t, c = x_BxTxHxC.shape[1], x_BxTxHxC.shape[3]
    inverse_C2 = theta ** (-jnp.arange(0, c, 2, dtype=jnp.float32) / c)
    angle_Tx1xC2 = jnp.arange(t, dtype=jnp.float32)[:, None, None] * inverse_C2
    cos, sin = jnp.cos(angle_Tx1xC2), jnp.sin(angle_Tx1xC2)
    a, b = jnp.split(x_BxTxHxC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nnx.Module):
    """softmax(q kᵀ / √C) v over the tokens up to each one, with q and k normalised per head."""

    def __init__(self, config, dtype: jnp.dtype, scale, key: jax.Array):
        """`scale(matrix)` multiplies the initial values; the output is also divided by √(2 · layers)."""
        d, h, k, c = config.width, config.heads, config.kv_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim = h, k, c
        self.theta, self.eps, self.dtype = config.rope_theta, config.norm_eps, dtype
        std = d**-0.5
        self.query = normal(key, "query", (d, h * c), ("embed", "heads"), std * scale("query"))
        self.key = normal(key, "key", (d, k * c), ("embed", "heads"), std * scale("key"))
        self.value = normal(key, "value", (d, k * c), ("embed", "heads"), std * scale("value"))
        out_std = (h * c) ** -0.5 * (2 * config.layers) ** -0.5
        self.output = normal(key, "output", (h * c, d), ("heads", "embed"), out_std * scale("output"))
        self.query_gain = constant(jnp.zeros(c), ("channel",))
        self.key_gain = constant(jnp.zeros(c), ("channel",))

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        b, t, _ = x_BxTxD.shape

        def heads(w, n):
            return (x_BxTxD @ w[...].astype(self.dtype)).reshape(b, t, n, self.head_dim)

        q_BxTxHxC = ops.rms_norm(heads(self.query, self.heads), self.query_gain[...], self.eps)
        k_BxTxKxC = ops.rms_norm(heads(self.key, self.kv_heads), self.key_gain[...], self.eps)
        v_BxTxKxC = heads(self.value, self.kv_heads)
        q_BxTxHxC = rope(q_BxTxHxC, self.theta).astype(self.dtype)
        k_BxTxKxC = rope(k_BxTxKxC, self.theta).astype(self.dtype)
        out_BxTxHxC = jax.nn.dot_product_attention(q_BxTxHxC, k_BxTxKxC, v_BxTxKxC, is_causal=True)
        return out_BxTxHxC.reshape(b, t, -1) @ self.output[...].astype(self.dtype)
