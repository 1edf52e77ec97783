"""A mixture of SwiGLU experts: each token goes to the few that its router prefers, and to one that all share.

arXiv 2401.06066 (shared and fine-grained experts); the router and the gated shared expert as Qwen3.8-Flash-Next has
them (report on GR, arXiv 2608.30320; transformers' `qwen4_exp`). Dimensions: B batch, T time, D width, E experts, F
hidden width of an expert, S tokens of the batch, K experts a token.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from grlab import errors
from grlab.layers.ffn import SwiGLU
from grlab.ops import streams as ops
from grlab.ops.grouped import grouped_matmul
from grlab.params import fold, normal


class MoE(nnx.Module):
    """Σ_k p_k expert_k(x) + σ(w x) shared(x), with p the K largest of softmax(W_router x), made to sum to 1.

    No token is dropped and no expert has a capacity. The router is float32 throughout, and AdamW's.
    """

    def __init__(self, config, dtype: jnp.dtype, initial_std, key: jax.Array):
        """`initial_std` is `Residual.initial_std`; by default an output starts at 1/√(2 · layers) of its fan-in's."""
        d, e, f = config.width, config.moe.experts, config.moe.ffn
        self.top_k, self.dtype = config.moe.top_k, dtype

        def matrices(name: str, fan_in: int, fan_out: int, axes: tuple[str, str], std: float) -> nnx.Param:
            std = initial_std(name, fan_in, fan_out, std)
            share = self.top_k / e  # of an expert's parameters that a token makes use of, on average
            return normal(key, name, (e, fan_in, fan_out), ("experts", *axes), std, muon=(-2, -1), share=share)

        self.router = normal(key, "router", (d, e), ("embed", "experts"), 0.02)  # as transformers' starts
        self.gate = matrices("gate", d, f, ("embed", "mlp"), d**-0.5)
        self.up = matrices("up", d, f, ("embed", "mlp"), d**-0.5)
        self.down = matrices("down", f, d, ("mlp", "embed"), f**-0.5 * (2 * config.layers) ** -0.5)
        if config.moe.shared:
            self.shared = SwiGLU(config, dtype, initial_std, fold(key, "shared"), hidden=config.moe.shared)
            self.shared_gate = normal(key, "shared_gate", (d, 1), ("embed", ""), d**-0.5)

    @staticmethod
    def check(config) -> None:
        """Raises UsageError for fields that cannot be."""
        for name in ("experts", "top_k", "ffn"):
            errors.positive(f"model.moe.{name}", config.moe[name])
        if config.moe.top_k > config.moe.experts:
            raise errors.UsageError("model.moe.top_k", config.moe.top_k, f"at most experts={config.moe.experts}")

    def __call__(self, x_BxTxD: jax.Array, documents_BxT: jax.Array | None = None):
        """(y [B, T, D], the router's statistics: scalars in float32).

        `balance` is the loss of arXiv 2101.03961, eq. 4-6, over the tokens of this call: E Σ_e f_e P_e, with f_e how
        many choices a token gives to expert e on average, and P_e its mean probability; K when all are used alike.
        `router_entropy` is in nats; `busiest_expert` is the load of the most used expert over the mean load.
        """
        del documents_BxT
        x_SxD = x_BxTxD.reshape(-1, x_BxTxD.shape[-1])
        probabilities_SxE = jax.nn.softmax(ops.project(x_SxD, self.router[...], ops.F32), axis=-1)
        weights_SxK, chosen_SxK = jax.lax.top_k(probabilities_SxE, self.top_k)
        weights_SxK = weights_SxK / jnp.sum(weights_SxK, axis=-1, keepdims=True)
        e = probabilities_SxE.shape[1]
        sizes_E = jnp.bincount(chosen_SxK.reshape(-1), length=e)

        y_SxD = self._experts(x_SxD, weights_SxK, chosen_SxK, sizes_E)
        if hasattr(self, "shared"):
            gate_Sx1 = jax.nn.sigmoid(ops.project(x_SxD, self.shared_gate[...], self.dtype))
            shared_BxTxD, _ = self.shared(x_BxTxD)
            y_SxD = y_SxD + gate_Sx1 * shared_BxTxD.reshape(x_SxD.shape).astype(ops.F32)

        load_E = sizes_E / len(x_SxD)
        logs_SxE = jnp.log(jnp.maximum(probabilities_SxE, 1e-30))
        statistics = {
            "balance": e * jnp.sum(load_E * jnp.mean(probabilities_SxE, axis=0)),
            "router_entropy": -jnp.mean(jnp.sum(probabilities_SxE * logs_SxE, axis=-1)),
            "busiest_expert": jnp.max(load_E) * e / self.top_k,
        }
        return y_SxD.astype(self.dtype).reshape(x_BxTxD.shape), statistics

    def _experts(self, x_SxD, weights_SxK, chosen_SxK, sizes_E):
        """The weighted sum of each token's experts, [S, D] in float32: rows sorted by expert, and back."""
        s, k = chosen_SxK.shape
        order_R = jnp.argsort(chosen_SxK.reshape(-1), stable=True)
        back_R = jnp.argsort(order_R)
        x_RxD = permute(jnp.repeat(x_SxD, k, axis=0), order_R, back_R)

        def expert(x, w):
            return grouped_matmul(x, w[...].astype(self.dtype), sizes_E)

        y_RxD = expert(jax.nn.silu(expert(x_RxD, self.gate)) * expert(x_RxD, self.up), self.down)
        y_SxKxD = permute(y_RxD, back_R, order_R).reshape(s, k, -1)
        return jnp.sum(weights_SxK[..., None] * y_SxKxD.astype(ops.F32), axis=1)


@jax.custom_vjp
def permute(x_RxD: jax.Array, order_R: jax.Array, back_R: jax.Array) -> jax.Array:
    """x[order], for an order whose inverse is `back`: its gradient is a permutation too, which XLA does not know."""
    del back_R
    return x_RxD[order_R]


permute.defvjp(
    lambda x_RxD, order_R, back_R: (x_RxD[order_R], back_R), lambda back_R, dout_RxD: (dout_RxD[back_R], None, None)
)
