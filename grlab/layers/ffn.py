"""The SwiGLU feed-forward network: W_down (SiLU(W_gate x) ⊙ W_up x). arXiv 2002.05202."""

import jax
import jax.numpy as jnp
from flax import nnx

from grlab import errors
from grlab.ops.matmul import matmul
from grlab.params import normal


class SwiGLU(nnx.Module):
    """Maps [B, T, D] to [B, T, D] by a hidden width of `config.ffn`, or `hidden` where it is given."""

    def __init__(self, config, dtype: jnp.dtype, initial_std, key: jax.Array, hidden: int = 0):
        """`initial_std` is `Residual.initial_std`; by default an output starts at 1/√(2 · layers) of its fan-in's."""
        d, f = config.width, hidden or config.ffn
        self.dtype = dtype
        muon = (-2, -1)
        self.gate = normal(key, "gate", (d, f), ("embed", "mlp"), initial_std("gate", d, f, d**-0.5), muon)
        self.up = normal(key, "up", (d, f), ("embed", "mlp"), initial_std("up", d, f, d**-0.5), muon)
        std = initial_std("down", f, d, f**-0.5 * (2 * config.layers) ** -0.5)
        self.down = normal(key, "down", (f, d), ("mlp", "embed"), std, muon)

    @staticmethod
    def check(config) -> None:
        """Raises UsageError for fields that cannot be."""
        errors.positive("model.ffn", config.ffn)

    def __call__(self, x_BxTxD: jax.Array, documents_BxT: jax.Array | None = None):
        """(y [B, T, D], no statistics)."""
        del documents_BxT
        gate_BxTxF = matmul(x_BxTxD, self.gate[...].astype(self.dtype))
        up_BxTxF = matmul(x_BxTxD, self.up[...].astype(self.dtype))
        return matmul(jax.nn.silu(gate_BxTxF) * up_BxTxF, self.down[...].astype(self.dtype)), {}
