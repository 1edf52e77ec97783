"""The optimizer's groups, and Muon as a batch of matrices.

Seen to fail: heads orthogonalised together, the stack of layers as one matrix, GR's projections to Muon; a fixed value
with a gradient, with an update, or counted; a constant rate whose warm-up goes on.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from grlab.params import Fixed, count
from grlab.train import optimizer
from tests import rows

MATRICES = {"query", "key", "value", "output", "gate", "up", "down"}


@pytest.mark.parametrize("row", rows.ROWS)
def test_groups(row):
    """With muon: the matrices of attention and FFN to Muon, all else that is trained to AdamW; with adamw: all."""
    config = rows.tiny(row)
    params = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: rows.build(config))))
    for path, variable in params:
        sublayer = path[-1] in MATRICES and path[-2] in ("attention", "ffn")
        config.optim.name = "adamw"
        assert optimizer.group(config.optim, variable) == ("fixed" if isinstance(variable, Fixed) else "adamw")
        config.optim.name = "muon"
        assert (optimizer.group(config.optim, variable) == "muon") is sublayer, path


LINEAR_MAPS = {  # of the kinds of layers, by module
    "gdn": {"query", "key", "value", "output"},
    "qsa": {"query", "key", "value", "output"},
    "moe": {"gate", "up", "down"},
    "shared": {"gate", "up", "down"},
    "ngram": {"key", "value"},
    "indexer": set(),
}
NO_DECAY = {
    "query_gain",
    "key_gain",
    "stream_gain",
    "conv_gain",
    "conv",
    "table",
    "norm_weight",
    "decay_log",
    "decay_bias",
}


def test_groups_of_every_kind_of_layer():
    """Muon has the linear maps; AdamW gates, router, decays, filters, indexer and the table, which does not decay."""
    config = rows.tiny("gr", *rows.HYBRID, "optim.name=muon")
    seen = set()
    for path, variable in nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: rows.build(config)))):
        if len(path) > 1 and path[-2] in LINEAR_MAPS:
            seen.add(path[-2])
            assert (optimizer.group(config.optim, variable) == "muon") is (path[-1] in LINEAR_MAPS[path[-2]]), path
            assert variable.decay is (path[-1] not in NO_DECAY), path
    assert seen == LINEAR_MAPS.keys()


def test_muon_orthogonalises_each_matrix_by_itself():
    """The update of a stack of layers and heads is, matrix by matrix, what optax's Muon gives that matrix alone."""
    config = rows.tiny("gr", "optim.name=muon", "optim.warmup=0", "optim.clip=1e9", "optim.weight_decay=0.0")
    shapes = nnx.state(nnx.eval_shape(lambda: rows.build(config)))
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), shapes)
    zeros = jax.tree.map(jnp.zeros_like, grads)
    tx = optimizer.make(config.optim, config.steps, shapes)
    updates, _ = jax.jit(tx.update)(grads, tx.init(zeros), zeros)
    alone = optax.contrib.muon(config.optim.lr, consistent_rms=optimizer.MUON_RMS)
    seen = set()
    for (path, update), (_, grad) in zip(nnx.to_flat_state(updates), nnx.to_flat_state(grads), strict=True):
        if path[-1] not in MATRICES:
            continue
        seen.add(path[-1])
        u, g = np.asarray(update.get_value()), np.asarray(grad.get_value())
        if path[-1] in ("query", "key", "value"):  # [L, D, H, C]: a matrix a head
            u, g = (np.moveaxis(v, 2, 1) for v in (u, g))
        for index in np.ndindex(u.shape[:-2]):
            wanted, _ = alone.update(g[index], alone.init(g[index]), g[index])
            np.testing.assert_allclose(u[index], wanted, rtol=1e-4, atol=1e-7)
            size = np.linalg.svd(u[index], compute_uv=False) / (config.optim.lr * 0.2 * max(u.shape[-2:]) ** 0.5)
            assert 0.5 < size.min() and size.max() < 1.3  # Newton-Schulz of five steps: singular values near 1
    assert seen == MATRICES


def test_schedules():
    """Warm-up from 0 to the peak, lr · lr_factor, then constant, or a cosine to a tenth."""
    optim = rows.tiny("prenorm", "steps=110", "optim.lr=1e-2", "optim.lr_factor=2.0", "optim.warmup=10").optim
    cosine = [float(optimizer.schedule(optim, 110)(s)) for s in (0, 5, 10, 60, 110)]
    np.testing.assert_allclose(cosine, [0, 1e-2, 2e-2, 1.1e-2, 2e-3], rtol=1e-5, atol=1e-9)
    optim.schedule = "constant"
    constant = [float(optimizer.schedule(optim, 110)(s)) for s in (0, 5, 10, 60, 110)]
    np.testing.assert_allclose(constant, [0, 1e-2, 2e-2, 2e-2, 2e-2], rtol=1e-5, atol=1e-9)
    optim.warmup = 0
    assert float(optimizer.schedule(optim, 110)(0)) == pytest.approx(2e-2)


def test_fixed_values_stay():
    """A value that is not trained has no gradient, no update and no place in the count of parameters."""
    config = rows.tiny("altup", "optim.warmup=0")
    shapes = nnx.state(nnx.eval_shape(lambda: rows.build(config)))
    tx = optimizer.make(config.optim, config.steps, shapes)
    ones = jax.tree.map(lambda s: jnp.ones(s.shape), shapes)
    updates, _ = tx.update(ones, tx.init(ones), ones)
    fixed = {path[-1]: u.get_value() for path, u in nnx.to_flat_state(updates) if isinstance(u, Fixed)}
    assert set(fixed) == {"active"} and not fixed["active"].any()
    graphdef, params = nnx.split(rows.decoder(config))
    grads = jax.jit(jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(rows.tokens()) ** 2)))(params)
    assert not any(np.any(g.get_value()) for _, g in nnx.to_flat_state(grads) if isinstance(g, Fixed))
    assert "fixed" in optimizer.describe_groups(config.optim, shapes)
    prenorm = count(nnx.state(nnx.eval_shape(lambda: rows.build(rows.tiny("prenorm")))))
    assert count(shapes) == prenorm + 4 * (2 * 2 + 2)  # p and g of each of four sites
