"""Every row there is: a config file in configs/ that builds one, or a setting of one in an experiment.

A new row is tested by being there.
"""

import functools
import json
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from configs.scales import SCALES
from grlab import config as configs
from grlab import residual
from grlab.experiment import load
from grlab.model import Decoder
from grlab.params import Fixed, fold

# The overrides that make `tiny` the scale tiny_hybrid: every kind of layer at work.
HYBRID = tuple(f"{field}={str(value).lower()}" for field, value in configs.flatten(SCALES["tiny_hybrid"]).items())
# Gated DeltaNet normalises outputs near zero (at a document's first token β (q·k) v): with the published epsilon of
# 1e-6 its first gradients are a hundred times the other layers', and the last digit of a sum grows a hundredfold in ten
# steps. This epsilon takes that away (nothing grows). A choice of experts or of blocks may fall the other way on the
# last digit: here all of them are chosen. For tests that compare runs whose sums are ordered otherwise.
HYBRID_MILD = (*HYBRID, "model.norm_eps=1e-2", "model.moe.top_k=4", "model.qsa.budget=32")
ROWS = sorted(p.stem for p in (configs.ROOT / "configs").glob("*.py") if p.stem not in ("base", "scales"))
TABLE5 = ("prenorm", "mhc_static", "mhc", "gr")


def tiny(row: str, *overrides: str) -> ConfigDict:
    """The row's config at the tests' scale.

    Sinkhorn runs 2 iterations where a test does not ask for more: compiling 20 takes the time of everything else.
    """
    config = configs.load(f"configs/{row}.py:tiny", overrides)
    if "iterations" in config.residual and not any(o.startswith("residual.iterations") for o in overrides):
        config.residual.iterations = 2
    return config


# The first row of each kind: for what its stream and hooks may break and its switches can not.
OF_EACH_KIND = sorted({tiny(row).residual.kind: row for row in reversed(ROWS)}.values())


def _settings() -> dict[str, tuple[str, ...]]:
    found = {row: (row,) for row in ROWS}
    seen = {json.dumps(tiny(row).residual.to_dict()) for row in ROWS}
    for path in sorted((configs.ROOT / "experiments").glob("*.py")):
        for row in load(path).rows:
            switches = [f"{field}={value}" for field, value in row.overrides.items() if field.startswith("residual.")]
            setting = (Path(row.config).stem, *switches)
            if (key := json.dumps(tiny(*setting).residual.to_dict())) not in seen:
                seen.add(key)
                found[f"{path.stem}-{row.name}"] = setting
    return found


# Every setting of `residual` that there is, in a config file or an experiment: name -> the arguments of `tiny`.
SETTINGS = _settings()


def build(config: ConfigDict) -> Decoder:
    """The row's model, made as a run makes it."""
    return Decoder(config.model, config.residual, 256, fold(jax.random.key(config.seed), "params"))


@functools.cache
def _split(config_json: str):
    return nnx.split(build(ConfigDict(json.loads(config_json))))


def decoder(config: ConfigDict) -> Decoder:
    """The row's model with its initial values: a model of one's own, though its values are drawn once."""
    graphdef, state = _split(json.dumps(config.to_dict(), sort_keys=True))
    return nnx.merge(graphdef, jax.tree.map(lambda value: value, state))  # merge would share the variables themselves


def layers(model: Decoder):
    """The layers of a model whose pattern is one layer, their parameters stacked: the pattern's one layer."""
    ((layer,),) = (stack.layers for stack in model.stacks)
    return layer


def system(row: str, *overrides: str):
    """(the row's residual system, its config), two layers of width 16."""
    config = tiny(row, *overrides)
    return residual.build(config.residual, width=16, layers=2, key=jax.random.key(0)), config


def tokens(batch: int = 2, length: int = 24, seed: int = 0) -> np.ndarray:
    """Random byte tokens [batch, length]."""
    return np.random.default_rng(seed).integers(0, 256, (batch, length), dtype=np.int32)


def randomise(module, std: float, seed: int = 0, names: tuple[str, ...] = (), fresh: bool = False) -> None:
    """Adds N(0, std²) to a module's parameters (those of `names`, if given), or sets them to it where `fresh`."""
    state = nnx.state(module)
    flat = nnx.to_flat_state(state)
    for i, (path, variable) in enumerate(flat):
        if isinstance(variable, Fixed) or (names and path[-1] not in names):
            continue
        noise = std * jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), variable.shape)
        variable.set_value(noise if fresh else variable.get_value() + noise)
    nnx.update(module, state)


def data_path(tmp: Path) -> Path:
    """A folder of text files to train on: the package's own source."""
    folder = tmp / "text"
    folder.mkdir(parents=True, exist_ok=True)
    for file in (configs.ROOT / "grlab").rglob("*.py"):
        if file.stat().st_size:
            (folder / "_".join(file.relative_to(configs.ROOT).parts)).write_text(file.read_text())
    return folder
