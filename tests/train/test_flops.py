"""Operations a token: against XLA's own count, against counts by hand, and for what XLA miscounts.

Seen to fail: a scan counted once; kernels among what is counted; the largest of a choice of programs for the least; a
contraction left out.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from ml_collections import ConfigDict

from grlab.model import Decoder
from grlab.train import flops
from tests import rows


@pytest.mark.parametrize("width", [64, 128])  # of 128 on there are kernels, too
@pytest.mark.parametrize("row", ["prenorm", "gr", "mhc", "attnres"])
def test_the_count_is_xlas_where_xla_counts_all(row, width):
    """Dense attention, unrolled: within 1 % of what XLA says of the program before it is optimised."""
    config = rows.tiny(row, f"model.width={width}", f"model.ffn={3 * width}", f"seq_len={4 * width}")
    m = ConfigDict(config.model.to_dict() | {"scan": False})
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(m, config.residual, 256, jax.random.key(0))))
    tokens_BxT = jax.ShapeDtypeStruct((1, config.seq_len), jnp.int32)
    cost = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t)).lower(params, tokens_BxT).cost_analysis()
    masked = 2 * m.heads * m.head_dim * config.seq_len * m.layers
    assert flops.per_token(config, 256) == pytest.approx(3 * (cost["flops"] / config.seq_len - masked), rel=0.01)


def test_loops_and_experts_are_counted_as_they_run():
    """A scan as often as it runs; rows of experts once, however many experts there are; attention alone is halved."""

    def count(*more):
        return flops.per_token(rows.tiny("prenorm", *rows.HYBRID, *more), 256)

    assert count("model.scan=false") == pytest.approx(count(), rel=1e-6)
    d, f, t = 16, 16, 32
    expert = 3 * 2 * 3 * d * f * 4  # of four layers: gate, up and down, forwards and twice backwards
    assert count("model.moe.top_k=3") - count() == pytest.approx(expert, rel=0.1)
    router = 3 * 2 * d * 4 * 4
    assert count("model.moe.experts=8") - count() == pytest.approx(router, rel=0.5)
    # The state of a Gated DeltaNet is read, corrected and written in chunks whose number grows with the length alone.
    longer = [count("model.pattern=gdn", f"seq_len={length}") for length in (t, 2 * t)]
    assert longer[1] == pytest.approx(longer[0], rel=0.01)


def test_flops_count_the_connection_and_half_the_attention():
    """Pre-norm's count is that of its products by hand and up to a quarter more; GR's is larger by its projections.

    A layer adds the same in pre-norm, and more the deeper it lies where a sublayer reads all outputs before it.
    """
    config = rows.tiny("prenorm")
    m = config.model
    products = m.layers * (m.width * (2 * m.heads + 2 * m.kv_heads) * m.head_dim + 3 * m.width * m.ffn)
    products += m.width * 256
    attention = m.layers * 2 * m.heads * m.head_dim * config.seq_len  # q kᵀ and weights · v, the causal half
    by_hand = 3 * 2 * (products + attention / 2)
    prenorm = flops.per_token(config, 256)
    assert by_hand < prenorm < 1.25 * by_hand
    n, d, r, sites = 4, 16, 2, 2 * m.layers
    projections = 3 * 2 * ((sites + 1) * 2 * n * d * r + sites * n * n * d)
    assert flops.per_token(rows.tiny("gr"), 256) - prenorm > projections
    deeper = flops.per_token(rows.tiny("prenorm", "model.layers=4"), 256)
    assert deeper - prenorm == pytest.approx(prenorm - 3 * 2 * m.width * 256, rel=0.15)
    attnres = [flops.per_token(rows.tiny("attnres", f"model.layers={layers}"), 256) for layers in (2, 4, 6)]
    assert attnres[2] - attnres[1] > 1.05 * (attnres[1] - attnres[0])
