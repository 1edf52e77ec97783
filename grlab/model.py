"""The decoder: embed → expand → layers → collapse → logits. It knows no residual system by name."""

import jax
import jax.numpy as jnp
from flax import nnx

from grlab import errors, residual
from grlab.layers.attention import Attention
from grlab.layers.ffn import SwiGLU
from grlab.ops.matmul import matmul
from grlab.params import fold, normal

REMAT = {
    "none": None,  # keep every activation
    "full": jax.checkpoint_policies.nothing_saveable,  # recompute each layer from its input
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # keep the products with weights
}


class Layer(nnx.Module):
    """Two sublayers, each behind its site."""

    def __init__(self, config, system: residual.Residual, index: jax.Array | int, key: jax.Array):
        dtype = jnp.dtype(config.compute_dtype)
        self.attention = Attention(config, dtype, system.initial_std, fold(key, "attention"))
        self.ffn = SwiGLU(config, dtype, system.initial_std, fold(key, "ffn"))
        self.attention_site = system.site(2 * index, fold(key, "attention_site"))
        self.ffn_site = system.site(2 * index + 1, fold(key, "ffn_site"))

    def __call__(self, stream):
        x_BxTxD, gates = self.attention_site.read(stream)
        y_BxTxD = self.attention(x_BxTxD)
        stream, x_BxTxD, gates = self.attention_site.write_read(stream, y_BxTxD, gates, self.ffn_site)
        return self.ffn_site.write(stream, self.ffn(x_BxTxD), gates)


class Decoder(nnx.Module):
    """A causal language model over tokens 0 .. vocab − 1."""

    def __init__(self, config, residual_config, vocab: int, key: jax.Array):
        """Builds the parameters.

        Args:
          config: `config.model` (configs/base.py).
          residual_config: `config.residual`.
          vocab: the number of tokens.
          key: of the initial values.

        Raises:
          UsageError: a field or a combination of fields that cannot be.
        """
        _check(config)
        self.scan, self.remat = config.scan, config.remat
        self.dtype = jnp.dtype(config.compute_dtype)
        self.residual = residual.build(
            residual_config,
            width=config.width,
            layers=config.layers,
            key=fold(key, "residual"),
            norm_eps=config.norm_eps,
            compute_dtype=config.compute_dtype,
        )
        self.embedding = normal(key, "embedding", (vocab, config.width), ("vocab", "embed"), config.embed_std)
        self.head = normal(key, "head", (config.width, vocab), ("embed", "vocab"), config.width**-0.5)

        # One layer's parameters, with a leading axis for the layers: what the scan runs over.
        layers_key = fold(key, "layers")
        self.layers = nnx.vmap(lambda i: Layer(config, self.residual, i, jax.random.fold_in(layers_key, i)))(
            jnp.arange(config.layers)
        )

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """The logits [B, T, V] in float32 of the token after each one."""
        x_BxTxD = self.embedding[...][tokens_BxT].astype(self.dtype)
        stream = self._run_layers(self.residual.expand(x_BxTxD))
        x_BxTxD = self.residual.collapse(stream)
        return matmul(x_BxTxD, self.head[...].astype(self.dtype), dtype=jnp.float32)

    def _run_layers(self, stream):
        graphdef, stacked = nnx.split(self.layers)

        def step(stream, params):
            return nnx.merge(graphdef, params)(stream), None

        if self.remat == "full" and self.scan:
            return _scan_packed(lambda stream, params: step(stream, params)[0], self.residual, stream, stacked)
        if self.remat != "none":
            # Inside a scan nothing merges the recomputation with the first computation, so the barrier is not needed.
            step = jax.checkpoint(step, policy=REMAT[self.remat], prevent_cse=not self.scan)
        if self.scan:
            return jax.lax.scan(step, stream, stacked)[0]
        for i in range(jax.tree.leaves(stacked)[0].shape[0]):
            stream, _ = step(stream, jax.tree.map(lambda p: p[i], stacked))
        return stream


def _scan_packed(step, system: residual.Residual, stream, stacked):
    """The scan of `step` over the layers, of which the backward pass has what the system keeps of each layer's input.

    With a system's default hooks it is `jax.checkpoint` with nothing saved. A packed stream may have fewer
    bits than a gradient needs, so the gradient of a layer is taken between the unpacked streams.
    """
    first_sites = 2 * jnp.arange(jax.tree.leaves(stacked)[0].shape[0])

    def forward(stream, stacked):
        def body(packed, of_layer):
            params, k = of_layer
            return system.pack(step(system.unpack(packed), params)), system.keep(packed, k)

        packed, kept = jax.lax.scan(body, system.pack(stream), (stacked, first_sites))
        return system.unpack(packed), (packed, kept, stacked)

    def backward(residuals, cotangent):
        after, kept, stacked = residuals

        def body(carry, of_layer):
            cotangent, after = carry
            kept, params, k = of_layer
            packed = system.recall(kept, after, k)
            cotangent, of_params = jax.vjp(step, system.unpack(packed), params)[1](cotangent)
            return (cotangent, packed), of_params

        (cotangent, _), of_params = jax.lax.scan(body, (cotangent, after), (kept, stacked, first_sites), reverse=True)
        return cotangent, of_params

    run = jax.custom_vjp(lambda stream, stacked: forward(stream, stacked)[0])
    run.defvjp(forward, backward)
    return run(stream, stacked)


def token_nats(logits_BxTxV: jax.Array, targets_BxT: jax.Array) -> jax.Array:
    """−log p(target) of each token, in nats: [B, T] float32."""
    picked_BxT = jnp.take_along_axis(logits_BxTxV, targets_BxT[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BxTxV, axis=-1) - picked_BxT


def _check(config) -> None:
    for name in ("layers", "width", "heads", "kv_heads", "head_dim", "ffn", "rope_theta", "norm_eps", "embed_std"):
        errors.positive(f"model.{name}", config[name])
    errors.one_of("model.remat", config.remat, REMAT)
    errors.one_of("model.compute_dtype", config.compute_dtype, ["float32", "bfloat16"])
    if config.heads % config.kv_heads:
        raise errors.UsageError("model.kv_heads", config.kv_heads, f"must divide model.heads={config.heads}")
    if config.head_dim % 2:
        raise errors.UsageError("model.head_dim", config.head_dim, "must be even: RoPE turns channels in pairs")
