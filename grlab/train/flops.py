"""Floating-point operations a token, as the table and MFU count them."""

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from grlab.model import Decoder


def per_token(config: ConfigDict, vocab: int) -> float | None:
    """Training FLOPs a token: 3 × the forward pass, with half of the attention products, the connection's included.

    XLA counts the operations of the unoptimised program, a loop's body once; so the layers are counted unrolled. Causal
    attention needs half of the T × T products that the program computes: that half is taken off. Recomputation (remat)
    is not work and not counted. None where the backend does not count.
    """
    model = ConfigDict(config.model.to_dict() | {"scan": False, "remat": "none"})
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(model, config.residual, vocab, jax.random.key(0))))
    tokens_BxT = jax.ShapeDtypeStruct((1, config.seq_len), jnp.int32)
    cost = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t)).lower(params, tokens_BxT).cost_analysis()
    if not cost:
        return None
    # q kᵀ and weights · v: 2 · 2 operations for each head, channel and pair of positions, half of them masked.
    masked = 2 * model.heads * model.head_dim * config.seq_len * model.layers
    return 3 * (cost["flops"] / config.seq_len - masked)
