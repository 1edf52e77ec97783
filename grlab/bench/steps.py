"""The training step of every row beside that of the baseline, at a scale and on the devices that there are."""

from collections.abc import Callable, Mapping

import jax
import numpy as np
from ml_collections import ConfigDict

from grlab import cost, parallel
from grlab.bench.timing import Times, side_by_side
from grlab.train.step import make_trainer

DEPTHS = (4, 48)  # periods of the layer pattern


def measure(configs: Mapping[str, ConfigDict], rounds: int, say: Callable[[str], None]) -> Times:
    """Times a step of each config (row -> the resolved config) in turn; all of them are in memory at once.

    The tokens are random: no row's speed depends on what they say.
    """
    calls = {}
    for row, config in configs.items():
        say(f"{row}: compiling")
        calls[row] = _step(config)
    say(f"{rounds} rounds of {len(calls)} rows")
    return side_by_side(calls, rounds, seconds=0.5)


def compile_times(configs: Mapping[str, ConfigDict], rounds: int, say: Callable[[str], None]) -> Times:
    """Times tracing and compiling a step of each config from nothing: {"ROW, L layers": seconds}."""
    calls = {}
    for row, config in configs.items():
        for layers in DEPTHS:
            of_depth = config.copy_and_resolve_references()
            of_depth.model.layers = layers * len(config.model.pattern.split(","))
            calls[f"{row}, {of_depth.model.layers} layers"] = lambda config=of_depth: _compile(config)
    say(f"{rounds} rounds of {', '.join(calls)}")
    return side_by_side(calls, rounds)


def _compile(config: ConfigDict) -> list:
    jax.clear_caches()
    mesh = parallel.make_mesh(config.mesh)
    cost.compile_step(config, make_trainer(config, cost.vocabulary(config), mesh), mesh)
    return []


def _step(config: ConfigDict) -> Callable[[], object]:
    """A call that makes one more update of the config's model."""
    mesh = parallel.make_mesh(config.mesh)
    parallel.check_batch(config.batch_size, config.optim.accumulate, mesh)
    trainer = make_trainer(config, cost.vocabulary(config), mesh)
    rng = np.random.default_rng(0)
    tokens_BxT = rng.integers(0, cost.vocabulary(config), (config.batch_size, config.seq_len), dtype=np.int32)
    batch = parallel.put_batch({"tokens_BxT": tokens_BxT, "targets_BxT": tokens_BxT}, mesh)
    state = trainer.init()

    def call():
        nonlocal state
        state, metrics = trainer.step(state, batch)
        return metrics["loss"]

    return call
