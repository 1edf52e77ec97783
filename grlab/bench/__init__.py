"""Speed, side by side: training steps, sites and what public code takes for them, the input pipeline."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from ml_collections import ConfigDict

from grlab import sweep
from grlab.bench import inputs, operations, sites, steps
from grlab.bench.timing import Times
from grlab.errors import check_directory, one_of, positive
from grlab.experiment import Experiment
from grlab.report.render import Block
from grlab.train.rundir import code_state, cores

PARTS = ("steps", "compile", "sites", "operations", "inputs")


def run(
    experiment: Experiment,
    scale: str,
    *,
    parts: str,
    rows: str,
    rounds: int,
    peers: bool,
    out: str | None,
    overrides: Sequence[str],
) -> None:
    """Prints the tables of `parts` ("steps,sites"); with `out` also writes every time there, as bench-SCALE.json.

    Raises UsageError for a part, a row or a field that there is not, and for a mesh that the devices do not make.
    """
    positive("--rounds", rounds)
    chosen = [part for part in parts.split(",") if part]
    for part in chosen or [parts]:
        one_of("--parts", part, PARTS)
    if out:
        check_directory("--out", out)
    names = {experiment.baseline} | {row.name for row in experiment.some(rows)}
    runs = sweep.plan(experiment, scale, (0,), "runs", overrides)
    configs = {r.row.name: ConfigDict(r.config) for r in runs if r.row.name in names}
    record = {**_machine(), "scale": scale, "overrides": list(overrides), "rounds": rounds}
    blocks = []
    for part in chosen:
        if part == "steps":
            times = steps.measure(configs, rounds, _say)
            labels = {name: experiment.row(name).label for name in configs}
            title = f"A training step at scale {scale}: times that of {labels[experiment.baseline]}"
            blocks.append(_block(title, times, labels, dict.fromkeys(configs, experiment.baseline)))
            record["steps"] = _seconds(times)
        elif part == "compile":
            times = steps.compile_times(configs, rounds, _say)
            shallow, deep = list(times.seconds)[::2], list(times.seconds)[1::2]
            title = f"Compiling a training step at scale {scale}: times that of the shallow model"
            names = {name: name for name in times.seconds}
            blocks.append(_block(title, times, names, dict(zip(deep, shallow, strict=True))))
            record["compile"] = _seconds(times)
        elif part == "sites":
            times = sites.measure(rounds, peers, _say)
            title = f"A site, forward and backward: {sites.TOKENS} tokens, width {sites.WIDTH}, {sites.STREAMS} streams"
            blocks.append(_block(title, times, {name: name for name in times.seconds}, sites.compared(times.seconds)))
            record["sites"] = _seconds(times)
        elif part == "operations":
            _say(f"compiling operations for {operations.CHIP}")
            record["operations"] = found = operations.measure()
            blocks.append(Block(operations.TITLE, operations.HEADER, operations.lines(found)))
        else:
            speed = inputs.measure(configs[experiment.baseline], rounds)
            blocks.append(Block("The input pipeline alone", ["", "tokens/s"], [[f"scale {scale}", f"{speed:,.0f}"]]))
            record["inputs"] = {"tokens_per_s": speed}
    print("\n\n".join(block.terminal(120) for block in blocks))
    if out:
        path = Path(out) / f"bench-{scale}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"\nwrote {path}")


def _block(title: str, times: Times, labels: dict[str, str], baselines: dict[str, str]) -> Block:
    """A line each: milliseconds, and the ratio to the baseline's time with its quartiles over the rounds."""
    lines = []
    for name, label in labels.items():
        line = [label, f"{1e3 * times.median(name):,.2f}", "", ""]
        if (baseline := baselines.get(name)) is not None:
            middle, lower, upper = times.ratio(name, baseline)
            line[2:] = [f"{middle:.2f} × {labels[baseline]}", f"{lower:.2f} .. {upper:.2f}"]
        lines.append(line)
    return Block(title, ["", "ms", "median ratio", "quartiles"], lines)


def _seconds(times: Times) -> dict[str, list[float]]:
    return {name: [float(f"{s:.4g}") for s in seconds] for name, seconds in times.seconds.items()}


def _machine() -> dict:
    device = jax.devices()[0]
    return code_state() | {"device_kind": device.device_kind, "device_count": jax.device_count(), "cores": cores()}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
