"""Every row of every experiment trains a step at a tiny width, so that no config rots."""

import jax
import numpy as np
import pytest
from flax import nnx

from grlab import parallel
from grlab import sweep as sweeps
from grlab.config import ROOT, flatten
from grlab.config import load as load_config
from grlab.experiment import load
from grlab.params import Fixed
from grlab.train.step import make_trainer
from tests import rows


def distinct() -> dict[str, list[str]]:
    """One row for each different training step over all experiments: its name -> the command's overrides."""
    found, seen = {}, set()
    for path in sorted((ROOT / "experiments").glob("*.py")):
        for run in sweeps.plan(load(path), "tiny", (0,), "runs"):
            parts = {part: run.config[part] for part in ("residual", "model", "optim")}
            parts["optim"] = {k: v for k, v in parts["optim"].items() if k in ("name", "schedule")}
            key = tuple(flatten(parts).items())
            if key not in seen:
                seen.add(key)
                found[f"{path.stem}-{run.row.name}"] = run.command[3:]
    return found


DISTINCT = distinct()


@pytest.mark.parametrize("name", DISTINCT)
def test_a_row_trains_a_step(name):
    config_path, _, *overrides = (argument.partition("=")[2] for argument in DISTINCT[name])
    names = [argument.partition("=")[0].removeprefix("--config.") for argument in DISTINCT[name][2:]]
    config = load_config(config_path, [f"{n}={v}" for n, v in zip(names, overrides, strict=True)])
    config.optim.warmup = 0
    if "iterations" in config.residual:
        config.residual.iterations = 2  # 20 are in the goldens; unrolled, they are most of the compilation
    trainer = make_trainer(config, 256, parallel.make_mesh(config.mesh))
    # Parameters of any value do for this, and to draw the model's own would take longer than the step; but what is
    # fixed, such as a site's place among the sources, is what it is.
    draws = np.random.default_rng(0)
    state = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), trainer.abstract)
    fixed = dict(nnx.to_flat_state(jax.jit(lambda: nnx.state(rows.build(config), Fixed))()))
    before = nnx.from_flat_state(
        (
            path,
            v.replace(
                np.array(fixed[path].get_value()) if path in fixed else 0.1 * draws.standard_normal(v.shape, np.float32)
            ),
        )
        for path, v in nnx.to_flat_state(trainer.abstract.params)
    )
    state = jax.device_put(state._replace(params=before))
    batch = {"tokens_BxT": rows.tokens(4, 32), "targets_BxT": rows.tokens(4, 32, seed=1)}
    step = trainer.step.lower(state, batch).compile({"xla_backend_optimization_level": 0})
    state, metrics = step(state, batch)
    assert np.isfinite(metrics["loss"]) and 4 < metrics["loss"] < 8 and metrics["grad_norm"] > 0
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (state.params, before)), strict=True)]
    assert all(np.isfinite(moved)) and np.median(moved) > 1e-4
