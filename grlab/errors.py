"""Errors that are the user's to mend: one line that names the field, the value and the way out."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


class UsageError(ValueError):
    """A wrong command, config or input. `launch.py` prints it on one line and exits with status 2."""

    def __init__(self, field: str, value: object, remedy: str):
        self.field, self.value, self.remedy = field, value, remedy
        super().__init__(f"{field}={value!r}: {remedy}")


class RunFailed(RuntimeError):
    """A run that was asked for correctly and failed or diverged. `launch.py` exits with status 1."""


def unknown(field: str, value: object, known: Iterable[str]) -> UsageError:
    """The error for a name that is not among `known`: it offers the nearest one and lists them all."""
    known = list(known)
    return UsageError(field, value, f"{nearest(value, known)}known: {', '.join(known)}")


def nearest(value: object, known: Iterable[str]) -> str:
    """ "did you mean 'gr'? ", or nothing where no known name is near."""
    near = difflib.get_close_matches(str(value), known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def first_line(e: Exception) -> str:
    """The kind and the first line of somebody else's error."""
    return f"{type(e).__name__}: {(str(e).strip() or '-').splitlines()[0][:200]}"


def one_of(field: str, value: object, known: Iterable[str]) -> None:
    """Raises unless `value` is among `known`."""
    if value not in (known := list(known)):
        raise unknown(field, value, known)


def positive(field: str, value: float) -> None:
    """Raises unless `value` is above zero."""
    if not value > 0:
        raise UsageError(field, value, "must be above 0")


def not_negative(field: str, value: float) -> None:
    """Raises unless `value` is zero or above."""
    if not value >= 0:
        raise UsageError(field, value, "must not be negative")


def check_directory(field: str, path: str | Path) -> None:
    """Raises unless `path` is a directory that can be written to, or one that can be made."""
    path = Path(path).absolute()
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir():
        raise UsageError(field, str(path), f"{'' if there == path else f'{there} '}is a file: give a directory")
    if not os.access(there, os.W_OK):
        raise UsageError(field, str(path), f"no permission to write to {there}: give another directory")
