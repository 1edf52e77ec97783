"""Rows x seeds -> commands, and what is left of them to do."""

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from grlab import report
from grlab.config import ROOT, UNCOMPARED, differences
from grlab.config import load as load_config
from grlab.errors import UsageError, check_directory
from grlab.experiment import Experiment, Row
from grlab.launchers import Launcher


@dataclasses.dataclass(frozen=True)
class Run:
    """One row at one seed. `command` is run from the repository's root; `config` is what it resolves to, as in JSON."""

    row: Row
    seed: int
    name: str  # "gr-0"
    workdir: Path  # absolute
    command: list[str]
    config: dict


class State(NamedTuple):
    """How far a run is: missing, unfinished, done, diverged, failed or foreign; `detail` says more in a few words."""

    kind: str
    detail: str = ""


def plan(
    experiment: Experiment, scale: str, seeds: Sequence[int], runs_dir: str | Path, extra_overrides: Sequence[str] = ()
) -> list[Run]:
    """The runs of an experiment, seed by seed, so that a sweep cut short leaves rows that can be compared.

    `extra_overrides` ("steps=500") are given to every row. Raises UsageError for a field that does not exist, for an
    override of what the experiment itself sets, and for a row that differs from the baseline in more than it declares.
    """
    own = {
        "seed": "--seeds",
        "seeds": "--seeds",
        "wandb.group": "the experiment",
        "row": "the experiment",
        "residual.kind": "the row",
    }
    own |= {field: f"row {row.name}" for row in experiment.rows for field in row.overrides}
    for override in extra_overrides:
        field = override.partition("=")[0]
        if field in own:
            raise UsageError(field, override.partition("=")[2], f"is set by {own[field]}; leave it out")

    runs = []
    for seed in seeds:
        root = Path(runs_dir).resolve()
        batch = [_run(experiment, row, scale, seed, root, extra_overrides) for row in experiment.rows]
        baseline = next(run for run in batch if run.row.name == experiment.baseline)
        for run in batch:
            for field, (ours, theirs) in differences(run.config, baseline.config).items():
                if not experiment.may_differ(run.row, field):
                    remedy = f"{experiment.baseline} has {theirs!r}; declare the field in the row's `differs`"
                    raise UsageError(f"{run.row.name}: {field}", ours, remedy)
        runs += batch
    return runs


def _run(experiment: Experiment, row: Row, scale: str, seed: int, runs_dir: Path, extra: Sequence[str]) -> Run:
    name = f"{row.name}-{seed}"
    workdir = runs_dir / name
    overrides = [f"seed={seed}", *(f"{field}={value}" for field, value in row.overrides.items()), *extra]
    overrides += [f"row={row.name}", f"wandb.group={experiment.name}"]
    path = f"{row.config}:{scale}"
    command = [sys.executable, "launch.py", "train", f"--config={path}", f"--workdir={_from_root(workdir)}"]
    command += [f"--config.{override}" for override in overrides]
    resolved = load_config(str(ROOT / path), overrides)
    return Run(row, seed, name, workdir, command, json.loads(json.dumps(resolved.to_dict())))


def _from_root(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def state(run: Run) -> State:
    """Reads `run.workdir`. A directory that belongs to another config is foreign; `detail` names the field."""
    config_file, final_file = run.workdir / "config.json", run.workdir / "final_result.json"
    if not config_file.exists():
        if run.workdir.is_file():
            return State("foreign", "it is a file")
        empty = not run.workdir.exists() or all(p.name.startswith(".") for p in run.workdir.iterdir())
        return State("missing") if empty else State("foreign", "it holds files and no config.json")
    for field, (there, ours) in differences(json.loads(config_file.read_text()), run.config, UNCOMPARED).items():
        return State("foreign", f"it was made with {field}={there!r}, this run has {field}={ours!r}")
    if not final_file.exists():
        return State("unfinished")
    final = json.loads(final_file.read_text())
    kind = final["status"] if final["status"] in ("done", "diverged") else "failed"
    return State(kind, final.get("reason", f"at step {final['step']}"))


def run_sweep(
    experiment: Experiment,
    scale: str,
    seeds: Sequence[int],
    runs_dir: str | Path,
    launcher: Launcher,
    dry_run: bool = False,
    extra_overrides: Sequence[str] = (),
) -> int:
    """Prints the plan, runs what is missing or unfinished, prints the table; 1 if a run failed or diverged, else 0.

    Runs that are done stay as they are, and so do those that diverged: the same command would diverge again. With
    `dry_run` it prints the shell commands that it would run, and runs nothing. Raises UsageError, before anything is
    run, when a run directory belongs to another config.
    """
    check_directory("--runs", runs_dir)
    runs = plan(experiment, scale, seeds, runs_dir, extra_overrides)
    states = [state(run) for run in runs]
    todo = [run for run, s in zip(runs, states, strict=True) if s.kind in ("missing", "unfinished")]
    print(f"{experiment.name}: {experiment.title}; scale {scale}; {len(runs)} runs, {len(todo)} to do")
    width = max(len(run.name) for run in runs)
    for run, s in zip(runs, states, strict=True):
        print(f"  {run.name:{width}}  {s.kind:10}  {s.detail}".rstrip())
    for run, s in zip(runs, states, strict=True):
        if s.kind == "foreign":
            remedy = f"is the directory of another run: {s.detail}; take another --runs, or remove the directory"
            raise UsageError("runs", str(_from_root(run.workdir)), remedy)
    if dry_run:
        if todo:
            print(f"cd {shlex.quote(str(ROOT))}")
        for run in todo:
            print(shlex.join(run.command))
        return 0

    sys.stdout.flush()
    statuses = dict(zip([run.name for run in todo], launcher(todo, ROOT), strict=True)) if todo else {}
    bad = []
    for run in runs:
        s, status = state(run), statuses.get(run.name, 0)
        # None: left to a scheduler and not waited for; its state is not known yet.
        if s.kind in ("diverged", "failed") or (status is not None and (status != 0 or s.kind != "done")):
            how = f"{s.kind} {s.detail}".rstrip() + (f", exit status {status}" if status else "")
            bad.append(f"  {run.name}: {how} ({_from_root(run.workdir)})")
    waiting = sum(status is None for status in statuses.values())
    if waiting:
        print(f"{waiting} runs are not waited for; `launch.py table` shows the table when they are through")
    else:
        Path(runs_dir).mkdir(parents=True, exist_ok=True)
        print()
        print(report.text(experiment, runs_dir))
    if bad:
        print("not done (a diverged run is not tried again; remove its directory to do so):", *bad, sep="\n")
    return 1 if bad else 0
