"""What the rows are at step 0, computed with a model's own sublayers and none of its sites.

Each returns (logits, tolerance): what the model's logits must be, within the tolerance times the largest of them.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from grlab.ops import streams as ops
from tests import rows

EXACT = 1e-5  # of rounding in another order of sums


def sublayers(model):
    """The attention and the FFN of each layer in turn, as functions [B, T, D] -> [B, T, D]."""
    graphdef, stacked = nnx.split(rows.layers(model))
    for i in range(jax.tree.leaves(stacked)[0].shape[0]):
        layer = nnx.merge(graphdef, jax.tree.map(lambda p, i=i: p[i], stacked))
        for sublayer in (layer.attention, layer.ffn):
            yield lambda x_BxTxD, sublayer=sublayer: sublayer(x_BxTxD)[0]


def embed(model, tokens_BxT):
    return model.embedding[...][tokens_BxT]


def norm(x, n=1):
    """RMSNorm with the gain that every norm starts with; `x` may be the sum of n streams."""
    return ops.rms_normalise(x, 1e-6 * n**2)


def layer_norm(x):
    return norm(x - jnp.mean(x, axis=-1, keepdims=True))


def prenorm(model, tokens_BxT, read=1.0, write=1.0):
    """Pre-norm: x + write · F(read · norm(x)), at the end read · norm(x)."""
    x_BxTxD = embed(model, tokens_BxT)
    for sublayer in sublayers(model):
        x_BxTxD = x_BxTxD + write * sublayer(read * norm(x_BxTxD))
    return read * norm(x_BxTxD) @ model.head[...], EXACT
