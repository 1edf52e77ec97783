"""A run directory: config.json, provenance.json, metrics.jsonl, final_result.json, checkpoints/, wandb/."""

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import uuid
from importlib import metadata
from pathlib import Path

import jax
from ml_collections import ConfigDict

from grlab.config import ROOT, UNCOMPARED, differences
from grlab.errors import UsageError, check_directory

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorflow-datasets", "numpy")


class RunDir:
    """The files of one run. Opening it finds whether it belongs to another; `claim` takes it."""

    def __init__(self, path: str | Path, config: ConfigDict):
        """Raises UsageError when `path` holds another run, or things that are no run."""
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self._fields = config.to_dict()
        self._lock = None
        if self.path.is_file():
            raise UsageError("--workdir", str(path), "is a file: give a directory")
        existing = self._read("config.json")
        # A kill before config.json leaves hidden files alone.
        if existing is None and self.path.is_dir() and not all(p.name.startswith(".") for p in self.path.iterdir()):
            raise UsageError("--workdir", str(path), "holds files but no config.json: give an empty or a new directory")
        for name, (was, now) in differences(existing or self._fields, self._fields, UNCOMPARED).items():
            remedy = f"belongs to a run with {name}={was!r}, this one has {now!r}: give another directory"
            raise UsageError("--workdir", str(path), remedy)

    def claim(self) -> None:
        """Makes the directory this run's, until the process ends; only once the config is known to be right.

        Raises UsageError when another process is training in it, and when it cannot be made or written to.
        """
        check_directory("--workdir", self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                "--workdir", str(self.path), "another process is training in it: wait, or stop it"
            ) from None
        except OSError:
            pass  # a file system without locks
        self._write("config.json", self._fields)

    def release(self) -> None:
        """Lets another process have the directory."""
        if self._lock is not None:
            self._lock.close()

    def result(self) -> dict | None:
        """final_result.json, or None while the run is unfinished."""
        return self._read("final_result.json")

    def finish(self, result: dict) -> None:
        """Writes final_result.json, the last thing a run does."""
        self._write("final_result.json", result)

    def open_provenance(self, *, fingerprint: str, step: int) -> dict:
        """Writes where this run comes from, or adds this resumption to it -> the record, with the run's stable id.

        Raises UsageError when the corpus is not the one that the run began with.
        """
        record = self._read("provenance.json")
        here = _provenance(fingerprint)
        if record is None:
            record = here | {"run_id": uuid.uuid4().hex[:8], "resumed": []}
        elif record["data_fingerprint"] != fingerprint:
            remedy = f"was trained on corpus {record['data_fingerprint'][:12]}, the corpus is now {fingerprint[:12]}: "
            raise UsageError("--workdir", str(self.path), remedy + "start a new run")
        else:
            changed = {k: v for k, v in here.items() if record.get(k) != v}
            record["resumed"].append({"step": step} | changed)
        self._write("provenance.json", record)
        return record

    def _read(self, name: str) -> dict | None:
        file = self.path / name
        if not file.is_file():
            return None
        try:
            return json.loads(file.read_text())
        except ValueError:
            raise UsageError("--workdir", str(self.path), f"{name} is not JSON: give another directory") from None

    def _write(self, name: str, value: dict) -> None:
        """Whole or not at all: a kill leaves the old file or the new one."""
        temporary = self.path / f".{name}.tmp"
        with temporary.open("w") as f:
            json.dump(value, f, indent=1, allow_nan=False)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(self.path / name)


def code_state() -> dict:
    """The commit of this code, what was changed since (a hash; empty: nothing), and the versions it runs with."""

    def git(*args):
        try:
            done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
        except OSError:
            return ""  # no git here
        return done.stdout if done.returncode == 0 else ""

    diff = git("diff", "HEAD", "--", "*.py")
    for new in git("ls-files", "--others", "--exclude-standard", "--", "*.py").splitlines():
        diff += new + (ROOT / new).read_text()
    return {
        "git_commit": git("rev-parse", "HEAD").strip(),
        "git_diff": hashlib.sha256(diff.encode()).hexdigest()[:12] if diff else "",
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES},
    }


def cores() -> int:
    """The CPU cores that this process may use: fewer than the machine has in a sweep with --jobs."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _provenance(fingerprint: str) -> dict:
    return code_state() | {
        "device_kind": jax.devices()[0].device_kind,
        "device_count": jax.device_count(),
        "processes": jax.process_count(),
        "host_cores": cores(),
        "data_fingerprint": fingerprint,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "command": " ".join(sys.argv),
    }
