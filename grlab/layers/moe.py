"""A mixture of SwiGLU experts: each token goes to the few that its router prefers, and to one that all share.

arXiv 2401.06066 (shared and fine-grained experts); the router and the gated shared expert as Qwen3.8-Flash-Next has
them (report on GR, arXiv 2608.30320; transformers' `qwen4_exp`). Dimensions: B batch, T time, D width, E experts, F
hidden width of an expert, K experts a token, R = B T K rows.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from grlab import errors
from grlab.layers.ffn import SwiGLU
from grlab.ops import mesh as meshes
from grlab.ops import streams as ops
from grlab.ops.grouped import grouped_matmul
from grlab.ops.remat import keep
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
            remedy = f"at most model.moe.experts={config.moe.experts}"
            raise errors.UsageError("model.moe.top_k", config.moe.top_k, remedy)

    def __call__(self, x_BxTxD: jax.Array, documents_BxT: jax.Array | None = None):
        """(y [B, T, D], the router's statistics: scalars in float32).

        `balance` is the loss of arXiv 2101.03961, eq. 4-6, over the tokens of this call: E Σ_e f_e P_e, with f_e how
        many choices a token gives to expert e on average, and P_e its mean probability; K when all are used alike.
        `router_entropy` is in nats; `busiest_expert` is the load of the most used expert over the mean load.
        """
        del documents_BxT
        probabilities_BxTxE = jax.nn.softmax(ops.project(x_BxTxD, self.router[...], ops.F32), axis=-1)
        weights_BxTxK, chosen_BxTxK = jax.lax.top_k(probabilities_BxTxE, self.top_k)
        weights_BxTxK = weights_BxTxK / jnp.sum(weights_BxTxK, axis=-1, keepdims=True)

        y_BxTxD = self._experts(x_BxTxD, weights_BxTxK, chosen_BxTxK)
        if hasattr(self, "shared"):
            gate_BxTx1 = jax.nn.sigmoid(ops.project(x_BxTxD, self.shared_gate[...], self.dtype))
            shared_BxTxD, _ = self.shared(x_BxTxD)
            y_BxTxD = y_BxTxD + gate_BxTx1 * shared_BxTxD.astype(ops.F32)

        e = probabilities_BxTxE.shape[-1]
        load_E = jnp.mean(jax.nn.one_hot(chosen_BxTxK, e), axis=(0, 1)).sum(axis=0)
        logs_BxTxE = jnp.log(jnp.maximum(probabilities_BxTxE, 1e-30))
        statistics = {
            "balance": e * jnp.sum(load_E * jnp.mean(probabilities_BxTxE, axis=(0, 1))),
            "router_entropy": -jnp.mean(jnp.sum(probabilities_BxTxE * logs_BxTxE, axis=-1)),
            "busiest_expert": jnp.max(load_E) * e / self.top_k,
        }
        return y_BxTxD.astype(self.dtype), statistics

    def _experts(self, x_BxTxD, weights_BxTxK, chosen_BxTxK):
        """The weighted sum of each token's experts, [B, T, D] in float32.

        On a mesh a device sorts the tokens that it has, and works on those of them that go to an expert of its own; the
        sum over the axes that split the experts and their hidden channels makes them whole.
        """
        matrices = [w[...].astype(self.dtype) for w in (self.gate, self.up, self.down)]
        if (mesh := meshes.current()) is None:
            return _experts_here(x_BxTxD, weights_BxTxK, chosen_BxTxK, *matrices, first=0)
        e, _, f = matrices[0].shape
        expert = "expert" if e % mesh.shape["expert"] == 0 else None
        tensor = "tensor" if f % mesh.shape["tensor"] == 0 else None
        split = tuple(axis for axis in (expert, tensor) if axis)

        def on_a_device(x, weights, chosen, gate, up, down):
            first = jax.lax.axis_index(expert) * len(gate) if expert else 0
            y = _experts_here(x, weights, chosen, gate, up, down, first=first)
            return jax.lax.psum(y, split) if split else y

        wide, narrow = PartitionSpec(expert, None, tensor), PartitionSpec(expert, tensor, None)
        of_tokens = (meshes.BY_BATCH,) * 3
        specs = {"in_specs": (*of_tokens, wide, wide, narrow), "out_specs": meshes.BY_BATCH}
        return jax.shard_map(on_a_device, mesh=mesh, check_vma=False, **specs)(
            x_BxTxD, weights_BxTxK, chosen_BxTxK, *matrices
        )


def _experts_here(x_BxTxD, weights_BxTxK, chosen_BxTxK, gate_ExDxF, up_ExDxF, down_ExFxD, *, first):
    """The weighted sum of the experts `first` .. first + E − 1 of each token: rows sorted by expert, and back."""
    (b, t, d), k, e = x_BxTxD.shape, chosen_BxTxK.shape[-1], len(gate_ExDxF)
    expert_R = chosen_BxTxK.reshape(-1) - first
    expert_R = jnp.where((expert_R >= 0) & (expert_R < e), expert_R, e)  # those of other devices come last
    order_R = jnp.argsort(expert_R, stable=True)
    back_R = jnp.argsort(order_R)
    sizes_E = jnp.bincount(expert_R, length=e)
    ours_Rx1 = (jnp.arange(len(order_R)) < jnp.sum(sizes_E))[:, None]
    x_RxD = permute(jnp.repeat(x_BxTxD.reshape(-1, d), k, axis=0), order_R, back_R)
    x_RxD = jnp.where(ours_Rx1, x_RxD, 0)  # and so their gradients
    gate_RxF, up_RxF = (keep(grouped_matmul(x_RxD, w_ExDxF, sizes_E)) for w_ExDxF in (gate_ExDxF, up_ExDxF))
    # The weights before the last product and not after it: its result, K times as wide as the stream, is then nothing
    # that the backward pass needs.
    weights_Rx1 = permute(weights_BxTxK.reshape(-1, 1), order_R, back_R)
    hidden_RxF = (weights_Rx1 * jax.nn.silu(gate_RxF) * up_RxF).astype(x_BxTxD.dtype)
    y_RxD = jnp.where(ours_Rx1, grouped_matmul(hidden_RxF, down_ExFxD, sizes_E), 0)
    y_BxTxKxD = permute(y_RxD, back_R, order_R).reshape(b, t, k, d)
    return jnp.sum(y_BxTxKxD.astype(ops.F32), axis=2)


@jax.custom_vjp
def permute(x_RxD: jax.Array, order_R: jax.Array, back_R: jax.Array) -> jax.Array:
    """x[order], for an order whose inverse is `back`: its gradient is a permutation too, which XLA does not know."""
    del back_R
    return x_RxD[order_R]


permute.defvjp(
    lambda x_RxD, order_R, back_R: (x_RxD[order_R], back_R), lambda back_R, dout_RxD: (dout_RxD[back_R], None, None)
)
