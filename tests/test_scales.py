"""The sizes of the scales: parameters in all, those that a token makes use of, and the connection's own."""

import jax
import pytest
from flax import nnx

from configs.scales import SCALES
from grlab import config as configs
from grlab.model import Decoder
from grlab.params import count, count_active
from tests.rows import ROWS


def model_of(row: str, scale: str):
    """(the abstract state of the row's model, nothing of it allocated; its config)."""
    config = configs.load(f"configs/{row}.py:{scale}")
    vocab = config.model.vocab or 256
    build = lambda: Decoder(config.model, config.residual, vocab, jax.random.key(0))  # noqa: E731
    return nnx.state(nnx.eval_shape(build)), config


def size(state, *names: str) -> int:
    """The parameters under paths that have a part of one of these names, or ending in it."""
    return sum(v.size for path, v in nnx.to_flat_state(state) if any(str(p).endswith(names) for p in path))


@pytest.mark.parametrize("row", ["prenorm", "mhc", "gr"])
@pytest.mark.parametrize(("scale", "total", "active"), [
    ("60m", 60e6, 60e6), ("400m", 400e6, 400e6), ("3b_a0p5b", 3e9, 0.5e9), ("25b_a3b", 25e9, 3e9),
])  # fmt: skip
def test_a_scale_is_of_about_the_size_in_its_name(row, scale, total, active):
    state, _ = model_of(row, scale)
    assert count(state) == pytest.approx(total, rel=0.11)
    assert count_active(state) == pytest.approx(active, rel=0.11)


def test_the_reports_ablation_scale():
    """25B-A3B with GR, the embeddings counted: 24.81 B within 1 %, and 2.96 B; 28 layers, which are 56 sites."""
    state, config = model_of("gr", "25b_a3b")
    assert config.model.layers == 28
    assert count(state) == pytest.approx(25e9, rel=0.01)
    assert count_active(state) == pytest.approx(3e9, rel=0.02)


def test_flash_next_is_the_published_size():
    """125 B and 51 B in the table of n-grams; 6 B for a token beside the embeddings; GR's part 640.6 M (facts of its
    report and checkpoint: 6,604,800 a site, and the final read)."""
    state, config = model_of("gr", "flash_next")
    table, embeddings = size(state, "table"), size(state, "embedding") + size(state, "head")
    assert table == pytest.approx(51.2e9, rel=1e-4)
    assert count(state) - table == pytest.approx(125e9, rel=0.01)
    assert count_active(state) - embeddings == pytest.approx(6e9, rel=0.01)
    n, d, r = 4, 2560, 320
    site = n * d + 2 * n * d * r + n * n * d
    assert site == 6_604_800
    assert size(state, "_site", "residual") == 96 * site + (site - n * n * d) == 640_624_640


def test_a_token_uses_a_share_of_experts_and_of_tables():
    """By hand at the scale tiny_hybrid: 2 of 4 experts, and one row for each of 4 hashes."""
    state, config = model_of("prenorm", "tiny_hybrid")
    m = config.model
    experts = m.layers * 3 * m.moe.experts * m.width * m.moe.ffn
    table = size(state, "table")
    rows = table // (m.ngram.width // 4)
    unused = experts * (1 - m.moe.top_k / m.moe.experts) + table * (1 - 4 / rows)
    assert count(state) - count_active(state) == pytest.approx(unused, abs=1)


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_loads_for_every_row_that_has_rates_of_its_own(scale):
    for row in ("prenorm", "gr", "mhc"):
        config = configs.load(f"configs/{row}.py:{scale}")
        assert config.scale == scale and config.residual.kind == row


@pytest.mark.parametrize("row", ROWS)
def test_streams_are_of_the_compute_dtype_unless_they_are_told_otherwise(row):
    def dtypes(*overrides):
        config = configs.load(f"configs/{row}.py:60m", overrides)
        return config.model.compute_dtype, config.residual.stream_dtype

    assert dtypes() == ("bfloat16", "bfloat16")
    assert dtypes("model.compute_dtype=float32") == ("float32", "float32")
    assert dtypes("residual.stream_dtype=float32") == ("bfloat16", "float32")
