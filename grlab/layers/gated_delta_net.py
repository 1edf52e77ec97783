"""Gated DeltaNet: linear attention with a state that forgets and corrects itself. arXiv 2412.06464.

As Qwen3.8-Flash-Next has it: report on GR, arXiv 2608.30320, eq. 1-11. Dimensions: B batch, T time, D width, H key
heads, G value heads a key head, K and V channels of a key and of a value.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from grlab import errors
from grlab.layers.attention import by_heads
from grlab.ops import delta_rule
from grlab.ops import streams as ops
from grlab.ops.matmul import matmul
from grlab.params import constant, fold, normal


class GatedDeltaNet(nnx.Module):
    """The gated delta rule between short convolutions and a gated norm.

        q, k  = L2norm(SiLU(conv(W x))), q times 1/√K;   v = SiLU(conv(W_v x))
        β     = σ(W_β x);   g = −exp(A) softplus(W_α x + b_α)
        o     = the gated delta rule of q, k, v, exp g and β
        y     = W_o [RMSNorm(o) ⊙ w ⊙ σ(W_z x)]

    Key head h serves the value heads hG .. hG + G − 1. The norm's weight w is plain: the scale is w, not 1 + w.
    """

    def __init__(self, config, dtype: jnp.dtype, initial_std, key: jax.Array):
        """`initial_std` is `Residual.initial_std`; by default an output starts at 1/√(2 · layers) of its fan-in's."""
        d, gdn = config.width, config.gdn
        h, heads, k, v = gdn.key_heads, gdn.value_heads, gdn.key_dim, gdn.value_dim
        self.eps, self.dtype, self.chunk = config.norm_eps, dtype, gdn.chunk

        def matrix(name: str, heads: int, c: int) -> nnx.Param:
            std = initial_std(name, d, heads * c, d**-0.5)
            return normal(key, name, (d, heads, c), ("embed", "heads", "channel"), std, muon=(-3, -1))

        self.query, self.key, self.value = matrix("query", h, k), matrix("key", h, k), matrix("value", heads, v)
        for name, (n, c) in {"query": (h, k), "key": (h, k), "value": (heads, v)}.items():
            filters = normal(key, f"conv_{name}", (gdn.conv, n, c), ("rank", "heads", "channel"), gdn.conv**-0.5)
            setattr(self, f"conv_{name}", filters)
        # One output a head, and a gate: AdamW's (report, section 3.1).
        self.beta = normal(key, "beta", (d, heads), ("embed", "heads"), d**-0.5)
        self.decay = normal(key, "decay", (d, heads), ("embed", "heads"), d**-0.5)
        self.decay_bias = constant(jnp.ones(heads), ("heads",))
        rates = jax.random.uniform(fold(key, "decay_log"), (heads,), minval=0.01, maxval=16.0)
        self.decay_log = constant(jnp.log(rates), ("heads",))
        self.output_gate = normal(key, "output_gate", (d, heads, v), ("embed", "heads", "channel"), d**-0.5)
        self.norm_weight = constant(jnp.ones(v), ("channel",))
        std = initial_std("output", heads * v, d, (heads * v) ** -0.5 * (2 * config.layers) ** -0.5)
        self.output = normal(key, "output", (heads, v, d), ("heads", "channel", "embed"), std, muon=(-2, -1))

    @staticmethod
    def check(config) -> None:
        """Raises UsageError for fields that cannot be."""
        gdn = config.gdn
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "conv", "chunk"):
            errors.positive(f"model.gdn.{name}", gdn[name])
        if gdn.value_heads % gdn.key_heads:
            remedy = f"must be a multiple of model.gdn.key_heads={gdn.key_heads}"
            raise errors.UsageError("model.gdn.value_heads", gdn.value_heads, remedy)
        if gdn.chunk & gdn.chunk - 1:
            raise errors.UsageError("model.gdn.chunk", gdn.chunk, "must be a power of two")

    def __call__(self, x_BxTxD: jax.Array, documents_BxT: jax.Array | None = None):
        """(y [B, T, D], no statistics); with `documents_BxT` state and convolutions start anew in each document."""
        b, t, d = x_BxTxD.shape
        h, heads = self.query.shape[1], self.value.shape[1]

        def mixed(name):
            channels = by_heads(x_BxTxD, getattr(self, name), self.dtype)
            return jax.nn.silu(short_convolution(channels, getattr(self, f"conv_{name}")[...], documents_BxT))

        q_BxTxHxK, k_BxTxHxK = l2_normalise(mixed("query")), l2_normalise(mixed("key"))
        v_BxTxHxGxV = mixed("value").reshape(b, t, h, heads // h, -1)

        def a_head(w_DxHG):  # one number for each value head, float32
            return ops.project(x_BxTxD, w_DxHG[...], self.dtype)

        rate_BxTxHG = jnp.exp(self.decay_log[...]) * jax.nn.softplus(a_head(self.decay) + self.decay_bias[...])
        g_BxTxHxG = -rate_BxTxHG.reshape(b, t, h, -1)
        beta_BxTxHxG = jax.nn.sigmoid(a_head(self.beta)).reshape(b, t, h, -1)
        q_BxTxHxK = q_BxTxHxK * q_BxTxHxK.shape[-1] ** -0.5
        out_BxTxHxGxV = delta_rule.chunked(
            q_BxTxHxK, k_BxTxHxK, v_BxTxHxGxV, g_BxTxHxG, beta_BxTxHxG, documents_BxT, chunk=self.chunk
        )
        out_BxTxHGxV = ops.rms_normalise(out_BxTxHxGxV.reshape(b, t, heads, -1), self.eps) * self.norm_weight[...]
        gate_BxTxHGxV = jax.nn.sigmoid(by_heads(x_BxTxD, self.output_gate, self.dtype).astype(jnp.float32))
        out_BxTxHGV = (out_BxTxHGxV * gate_BxTxHGxV).astype(self.dtype).reshape(b, t, -1)
        return matmul(out_BxTxHGV, self.output[...].astype(self.dtype).reshape(-1, d)), {}


def l2_normalise(x: jax.Array) -> jax.Array:
    """x / √(Σ x² + 1e-6) over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def short_convolution(x_BxTx_: jax.Array, filters_Wx_: jax.Array, documents_BxT=None, dilation: int = 1) -> jax.Array:
    """The causal convolution of each channel with a filter of its own, the last tap at the token itself; in float32.

    With `documents_BxT` a tap that lies in another document is zero.
    """
    x_BxTx_, (width, t) = x_BxTx_.astype(jnp.float32), (len(filters_Wx_), x_BxTx_.shape[1])
    channels = [(0, 0)] * (x_BxTx_.ndim - 2)
    out = filters_Wx_[-1] * x_BxTx_
    for back in range(dilation, min(dilation * width, t), dilation):
        earlier = jnp.pad(x_BxTx_[:, : t - back], [(0, 0), (back, 0), *channels])
        if documents_BxT is not None:
            same_BxT = jnp.pad(documents_BxT[:, back:] == documents_BxT[:, : t - back], ((0, 0), (back, 0)))
            earlier = earlier * same_BxT.reshape(*same_BxT.shape, *(1 for _ in channels))
        out = out + filters_Wx_[-1 - back // dilation] * earlier
    return out
