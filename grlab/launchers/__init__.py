"""Where the runs of a sweep are carried out. A launcher is a module with one function, `launch`."""

import functools
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from grlab.errors import UsageError, one_of

GROUPS = ("slurm", "pod")  # the launchers that take options: --slurm.FIELD=VALUE
KINDS = ("local", *GROUPS)


class Job(Protocol):
    """What a launcher needs to know of a run."""

    name: str  # "gr-0"
    command: Sequence[str]  # to be run from `cwd`
    workdir: Path  # the run directory
    config: dict  # the resolved config, as in JSON


# launch(jobs, cwd, width) -> the exit status of each job, or None for one that is not waited for; `width` is how many
# run at a time. Raises UsageError before anything is run, RunFailed when it is stopped before its jobs are through.
Launcher = Callable[[Sequence[Job], Path, int], list[int | None]]


def get(kind: str, options: Sequence[str] = ()) -> Launcher:
    """The launcher of that name, given its `options` ("slurm.partition=gpu") as a mapping from field to text.

    Raises UsageError, with the nearest name for an unknown kind, and for an option of another launcher.
    """
    one_of("on", kind, KINDS)
    fields = {}
    for option in options:
        name, _, value = option.partition("=")
        group, _, field = name.partition(".")
        if group != kind:
            raise UsageError(f"--{name}", value, f"is an option of --on={group}; this sweep is --on={kind}")
        if not value:
            raise UsageError(f"--{name}", value, f"give it a value: --{name}=VALUE")
        fields[field] = value
    launch = importlib.import_module(f"grlab.launchers.{kind}").launch
    return functools.partial(launch, options=fields) if fields else launch
