"""Causal self-attention with grouped queries, QK-norm and RoPE.

Dimensions: B batch, T time, D width, H query heads, K key-value heads, C channels of a head.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from grlab.ops import streams as ops
from grlab.ops.matmul import matmul
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

    def __init__(self, config, dtype: jnp.dtype, initial_std, key: jax.Array):
        """`initial_std` is `Residual.initial_std`; by default an output starts at 1/√(2 · layers) of its fan-in's."""
        d, h, k, c = config.width, config.heads, config.kv_heads, config.head_dim
        self.theta, self.eps, self.dtype = config.rope_theta, config.norm_eps, dtype

        def matrix(name: str, heads: int) -> nnx.Param:  # [D, H, C]: a matrix D -> C a head
            std = initial_std(name, d, heads * c, d**-0.5)
            return normal(key, name, (d, heads, c), ("embed", "heads", "channel"), std, muon=(-3, -1))

        self.query, self.key, self.value = matrix("query", h), matrix("key", k), matrix("value", k)
        std = initial_std("output", h * c, d, (h * c) ** -0.5 * (2 * config.layers) ** -0.5)
        self.output = normal(key, "output", (h, c, d), ("heads", "channel", "embed"), std, muon=(-2, -1))
        self.query_gain = constant(jnp.zeros(c), ("channel",))
        self.key_gain = constant(jnp.zeros(c), ("channel",))

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        b, t, d = x_BxTxD.shape

        def heads(w_DxHxC):
            h, c = w_DxHxC.shape[1:]
            return matmul(x_BxTxD, w_DxHxC[...].astype(self.dtype).reshape(d, h * c)).reshape(b, t, h, c)

        q_BxTxHxC = ops.rms_norm(heads(self.query), self.query_gain[...], self.eps)
        k_BxTxKxC = ops.rms_norm(heads(self.key), self.key_gain[...], self.eps)
        v_BxTxKxC = heads(self.value)
        q_BxTxHxC = rope(q_BxTxHxC, self.theta).astype(self.dtype)
        k_BxTxKxC = rope(k_BxTxKxC, self.theta).astype(self.dtype)
        out_BxTxHxC = jax.nn.dot_product_attention(q_BxTxHxC, k_BxTxKxC, v_BxTxKxC, is_causal=True)
        return matmul(out_BxTxHxC.reshape(b, t, -1), self.output[...].astype(self.dtype).reshape(-1, d))
