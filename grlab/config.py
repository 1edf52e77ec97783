"""Config files and their overrides, every mistake reported as one line."""

import importlib.util
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from grlab import errors

ROOT = Path(__file__).resolve().parent.parent
# What does not change what a run comes to: two configs that differ in these fields alone are of the same run, and a run
# may go on with others, such as the mesh of another number of devices, or beside other seeds.
UNCOMPARED = ("wandb", "log", "checkpoint", "mesh", "rules", "seeds")
_POSITIVE = (
    *("steps", "batch_size", "seq_len", "log.every"),
    *("optim.lr", "optim.lr_factor", "optim.clip", "optim.accumulate", "optim.eps"),
    *("eval.every", "eval.tokens", "eval.batch_size", "eval.cloze_context", "checkpoint.every"),
)
_NOT_NEGATIVE = (
    *("seed", "model.vocab", "optim.warmup", "optim.weight_decay"),
    *("eval.cloze_items", "eval.downstream_items"),
)
_WORDS = {"true": True, "false": False}


def load(spec: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """The resolved config of `path[:scale]` with overrides such as `optim.lr=3e-3`, checked.

    `path` is a file of configs/, or the config.json of a run directory, which gives that run again.

    Raises:
      UsageError: no such file, scale or field, a value of another type, or one out of its range.
    """
    path, _, scale = spec.partition(":")
    if path.endswith(".json"):
        if scale:
            raise errors.UsageError("--config", spec, f"a run's config has its scale: leave it out, --config={path}")
        return _override(_saved(path), overrides)
    get_config = import_file("--config", path, "configs", "get_config")
    try:
        config = get_config(*([scale] if scale else []))
    except ValueError as e:  # an unknown scale: configs raise plain errors, since they import nothing
        raise errors.UsageError("--config", spec, str(e)) from None
    except (AttributeError, KeyError) as e:  # a field that a locked config does not have; the message has the nearest
        raise errors.UsageError("--config", spec, errors.first_line(e)) from e
    return _override(config, overrides)


def _saved(path: str) -> ConfigDict:
    """The config that a run saved."""
    if not Path(path).is_file():
        raise errors.UsageError("--config", path, "no such file")
    try:
        saved = json.loads(Path(path).read_text())
    except ValueError:
        saved = None
    if not isinstance(saved, dict):
        raise errors.UsageError("--config", path, "is not the config of a run: not a JSON object")
    base = import_file("--config", ROOT / "configs/base.py", "configs", "get_config")()
    there = flatten(saved)
    missing = [field for field in flatten(base.to_dict()) if field not in there]
    if missing:
        remedy = f"lacks {', '.join(missing)}: add what the run had, see configs/base.py"
        raise errors.UsageError("--config", path, remedy)
    return ConfigDict(saved)


def _override(config: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    given = dict(override.partition("=")[::2] for override in overrides)
    if "seed" in given and given.get("seeds"):
        raise errors.UsageError(
            "config.seed", given["seed"], f"config.seeds={given['seeds']} is given, too: leave one out"
        )
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise errors.UsageError(f"config.{name}", text, f"give it a value: --config.{name}=VALUE")
        _set(config, name, text)
    config = ConfigDict(config.copy_and_resolve_references())
    check(config)
    return config


def import_file(field: str, path: str | Path, folder: str, name: str):
    """What the Python file at `path`, one as in the repository's `folder`, defines as `name`.

    A relative path is looked for here, then in the repository. Raises a UsageError of `field` when there is no such
    file or no such name in it.
    """
    file = Path(path)
    if not file.is_file():
        file = ROOT / path  # a command may be given from anywhere
    if not file.is_file() or file.suffix != ".py":
        raise errors.unknown(field, str(path), sorted(f"{folder}/{p.name}" for p in (ROOT / folder).glob("*.py")))
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # a config file imports the one it starts from: `from configs import base`
    spec = importlib.util.spec_from_file_location(f"{folder}_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise errors.UsageError(field, str(path), f"must define {name}")
    return getattr(module, name)


def _set(config: ConfigDict, name: str, text: str) -> None:
    node, so_far, leaf = config, "config", name.split(".")[-1]
    for part in name.split("."):
        if not isinstance(node, ConfigDict):
            raise errors.UsageError(f"config.{name}", text, f"{so_far} is one value and has no fields")
        if part not in node:
            raise errors.unknown(so_far, part, node)
        parent, node, so_far = node, node[part], f"{so_far}.{part}"
    if isinstance(node, ConfigDict):
        raise errors.UsageError(so_far, text, f"is a group of fields: set one of {', '.join(node)}")
    parent[leaf] = _parse(so_far, text, parent.get_type(leaf))


def _parse(field: str, text: str, kind: type):
    if kind is type(None):  # an unset placeholder, as JSON gives it back: all of them are of strings
        kind = str
    try:
        return _WORDS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise errors.UsageError(field, text, f"must be of type {kind.__name__}") from None


def check(config: ConfigDict) -> None:
    """Raises a UsageError for the first field whose value cannot be; the model and the data check their own."""
    for name, value in flatten(config.to_dict()).items():
        if isinstance(value, float) and not math.isfinite(value):
            hint = " (1e9 clips nothing)" if name == "optim.clip" else ""
            raise errors.UsageError(f"config.{name}", value, f"must be finite{hint}")
    for name in _POSITIVE:
        errors.positive(f"config.{name}", _get(config, name))
    for name in _NOT_NEGATIVE:
        errors.not_negative(f"config.{name}", _get(config, name))
    if config.checkpoint.keep < 2:
        remedy = "must be at least 2: the last one may be the first whose loss is not finite"
        raise errors.UsageError("config.checkpoint.keep", config.checkpoint.keep, remedy)
    for name in ("optim.b1", "optim.b2", "optim.final_lr"):
        if not 0 <= _get(config, name) < 1:
            raise errors.UsageError(f"config.{name}", _get(config, name), "must lie in [0, 1)")
    errors.one_of("config.optim.name", config.optim.name, ["adamw", "muon"])
    errors.one_of("config.optim.schedule", config.optim.schedule, ["cosine", "constant"])
    errors.one_of("config.wandb.mode", config.wandb.mode, ["auto", "online", "offline", "disabled"])
    if config.optim.warmup >= config.steps:
        raise errors.UsageError("config.optim.warmup", config.optim.warmup, f"must be below steps={config.steps}")
    if config.batch_size % config.optim.accumulate:
        remedy = f"must divide batch_size={config.batch_size}"
        raise errors.UsageError("config.optim.accumulate", config.optim.accumulate, remedy)
    for axis, size in config.mesh.items():
        if size < 1 and size != -1:
            raise errors.UsageError(f"config.mesh.{axis}", size, "must be above 0, or -1 for the devices left")
    if config.seeds:
        parse_seeds("config.seeds", config.seeds)
    elif config.mesh.seeds != 1:
        raise errors.UsageError("config.mesh.seeds", config.mesh.seeds, "is of several seeds: give --config.seeds, too")


def parse_seeds(field: str, text: str) -> tuple[int, ...]:
    """'3' -> (0, 1, 2), a count; '0,1,5' -> (0, 1, 5), a list; '1000,' -> (1000,), a list of one.

    Raises a UsageError of `field` for anything else.
    """
    try:
        seeds = tuple(int(s) for s in text.split(",") if s.strip()) if "," in text else tuple(range(int(text)))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise errors.UsageError(field, text, "give a count (3) or a list of different seeds (0,1,5; one seed: 7,)")
    return seeds


def _get(config: ConfigDict, name: str):
    for part in name.split("."):
        config = config[part]
    return config


def flatten(nested: Mapping, prefix: str = "") -> dict[str, object]:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}."""
    flat = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def covered(field: str, prefixes: Iterable[str]) -> bool:
    """Whether `field` is one of `prefixes` or lies under one."""
    return any(field == p or field.startswith(f"{p}.") for p in prefixes)


def differences(a: Mapping, b: Mapping, ignore: Iterable[str] = ()) -> dict[str, tuple[object, object]]:
    """The fields, but those under `ignore`, in which two nested mappings differ, and both values (None: absent)."""
    a, b, ignore = flatten(a), flatten(b), tuple(ignore)
    fields = [f for f in dict.fromkeys([*a, *b]) if not covered(f, ignore)]
    return {f: (a.get(f), b.get(f)) for f in fields if f not in a or f not in b or a[f] != b[f]}
