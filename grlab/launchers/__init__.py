"""Where the runs of a sweep are carried out. A launcher is a module with one function, `launch`."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from grlab.errors import one_of

KINDS = ("local",)


class Job(Protocol):
    """What a launcher needs to know of a run."""

    name: str  # "gr-0"
    command: Sequence[str]  # to be run from `cwd`
    workdir: Path  # the run directory


# launch(jobs, cwd) -> the exit status of each job, or None for one that was handed over and is not waited for.
# Raises RunFailed when it is stopped before its jobs are through.
Launcher = Callable[[Sequence[Job], Path], list[int | None]]


def get(kind: str) -> Launcher:
    """The launcher of that name; UsageError with the nearest one when there is none."""
    one_of("on", kind, KINDS)
    return importlib.import_module(f"grlab.launchers.{kind}").launch
