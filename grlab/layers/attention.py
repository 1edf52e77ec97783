"""Causal self-attention with grouped queries, QK-norm, RoPE and, where asked for, a gate on its output.

Dimensions: B batch, T time, D width, H query heads, K key-value heads, C channels of a head.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from grlab import errors
from grlab.ops import streams as ops
from grlab.ops.matmul import matmul
from grlab.ops.remat import keep
from grlab.params import constant, normal


def rope(x_BxTxHxC: jax.Array, theta: float, turned: int, position_BxT: jax.Array | None = None) -> jax.Array:
    """Rotary position embedding (arXiv 2104.09864), in float32: of the first `turned` channels, c turns with c + half.

    `position_BxT` is [1 or B, T]; None: 0 .. T − 1.
    """
    if position_BxT is None:
        position_BxT = jnp.arange(x_BxTxHxC.shape[1])[None]
    inverse_R2 = theta ** (-jnp.arange(0, turned, 2, dtype=jnp.float32) / turned)
    angle_BxTx1xR2 = position_BxT.astype(jnp.float32)[..., None, None] * inverse_R2
    cos, sin = jnp.cos(angle_BxTx1xR2), jnp.sin(angle_BxTx1xR2)
    a, b, rest = jnp.split(x_BxTxHxC.astype(jnp.float32), [turned // 2, turned], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


class Attention(nnx.Module):
    """softmax(q kᵀ / √C) v over the tokens up to each one, with q and k normalised per head.

    With `output_gate` the result is multiplied by σ(W_gate x), a gate for each head and channel (arXiv 2505.06708).
    """

    def __init__(self, config, dtype: jnp.dtype, initial_std, key: jax.Array):
        """`initial_std` is `Residual.initial_std`; by default an output starts at 1/√(2 · layers) of its fan-in's."""
        d, h, k, c = config.width, config.heads, config.kv_heads, config.head_dim
        self.theta, self.turned, self.eps, self.dtype = config.rope_theta, turned(config), config.norm_eps, dtype

        def matrix(name: str, heads: int) -> nnx.Param:  # [D, H, C]: a matrix D -> C a head
            std = initial_std(name, d, heads * c, d**-0.5)
            return normal(key, name, (d, heads, c), ("embed", "heads", "channel"), std, muon=(-3, -1))

        self.query, self.key, self.value = matrix("query", h), matrix("key", k), matrix("value", k)
        std = initial_std("output", h * c, d, (h * c) ** -0.5 * (2 * config.layers) ** -0.5)
        self.output = normal(key, "output", (h, c, d), ("heads", "channel", "embed"), std, muon=(-2, -1))
        self.query_gain = constant(jnp.zeros(c), ("channel",))
        self.key_gain = constant(jnp.zeros(c), ("channel",))
        if config.output_gate:  # AdamW's, as the report on GR has it (arXiv 2608.30320, section 3.1)
            self.output_gate = normal(key, "output_gate", (d, h, c), ("embed", "heads", "channel"), d**-0.5)

    @staticmethod
    def check(config) -> None:
        """Raises UsageError for fields that cannot be."""
        for name in ("heads", "kv_heads", "head_dim", "rope_theta"):
            errors.positive(f"model.{name}", config[name])
        if config.heads % config.kv_heads:
            raise errors.UsageError("model.kv_heads", config.kv_heads, f"must divide model.heads={config.heads}")
        if not 0 < config.rope_fraction <= 1:
            raise errors.UsageError("model.rope_fraction", config.rope_fraction, "must lie in (0, 1]")
        channels = config.head_dim * config.rope_fraction
        if turned(config) % 2 or not turned(config) or abs(channels - turned(config)) > 1e-6:
            field = "head_dim" if config.rope_fraction == 1 else "rope_fraction"
            found = f"{channels:g} of model.head_dim={config.head_dim}"
            remedy = f"RoPE turns channels in pairs: {found} must be an even number"
            raise errors.UsageError(f"model.{field}", config[field], remedy)

    def __call__(self, x_BxTxD: jax.Array, documents_BxT: jax.Array | None = None):
        """(y [B, T, D], no statistics); with `documents_BxT` a token sees those of its own document alone."""
        q_BxTxHxC, k_BxTxKxC, v_BxTxKxC = self.heads(x_BxTxD)
        mask = None
        if documents_BxT is not None:
            mask = (documents_BxT[:, :, None] == documents_BxT[:, None, :])[:, None]
        out_BxTxHxC = jax.nn.dot_product_attention(q_BxTxHxC, k_BxTxKxC, v_BxTxKxC, mask=mask, is_causal=True)
        return self.project(x_BxTxD, keep(out_BxTxHxC)), {}

    def heads(self, x_BxTxD: jax.Array):
        """q [B, T, H, C], k and v [B, T, K, C]: normed, turned and in the compute dtype."""
        q_BxTxHxC = ops.rms_norm(by_heads(x_BxTxD, self.query, self.dtype), self.query_gain[...], self.eps)
        k_BxTxKxC = ops.rms_norm(by_heads(x_BxTxD, self.key, self.dtype), self.key_gain[...], self.eps)
        q_BxTxHxC = rope(q_BxTxHxC, self.theta, self.turned).astype(self.dtype)
        k_BxTxKxC = rope(k_BxTxKxC, self.theta, self.turned).astype(self.dtype)
        return q_BxTxHxC, k_BxTxKxC, by_heads(x_BxTxD, self.value, self.dtype)

    def project(self, x_BxTxD: jax.Array, out_BxTxHxC: jax.Array) -> jax.Array:
        """The heads' outputs, gated, back at the model's width."""
        if hasattr(self, "output_gate"):
            gate_BxTxHxC = jax.nn.sigmoid(by_heads(x_BxTxD, self.output_gate, self.dtype).astype(jnp.float32))
            out_BxTxHxC = (out_BxTxHxC * gate_BxTxHxC).astype(self.dtype)
        w_HCxD = self.output[...].astype(self.dtype).reshape(-1, x_BxTxD.shape[-1])
        return matmul(out_BxTxHxC.reshape(*x_BxTxD.shape[:2], -1), w_HCxD)


def turned(config) -> int:
    """The channels of a head that RoPE turns."""
    return round(config.head_dim * config.rope_fraction)


def by_heads(x_BxTxD: jax.Array, w_DxHxC: nnx.Param, dtype: jnp.dtype) -> jax.Array:
    """x W for a matrix D -> C a head: [B, T, H, C]."""
    d, h, c = w_DxHxC.shape
    return matmul(x_BxTxD, w_DxHxC[...].astype(dtype).reshape(d, h * c)).reshape(*x_BxTxD.shape[:2], h, c)
