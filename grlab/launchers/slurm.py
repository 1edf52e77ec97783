"""Hands jobs to Slurm as one array job, through submitit; a job that is preempted or out of time is queued again."""

import contextlib
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grlab.errors import UsageError, first_line, one_of, positive
from grlab.launchers import Job

# submitit's own are 5 minutes, and 3 times out of time before a job is given up.
DEFAULTS = {"timeout_min": 240, "max_num_timeout": 100, "stderr_to_stdout": True}
_STRUCTURES = {"setup": list, "teardown": list, "srun_args": list, "additional_parameters": dict}  # given as JSON
_INTEGERS = ("time", "signal_delay_s", "max_num_timeout")
_WORDS = {"true": True, "false": False}
_SAVE = signal.SIGINT  # what asks the training command to save and end
# Its status then: as told; as told by another process of its run; before it has come to listen.
_STOPPED = (128 + _SAVE, 128 + signal.SIGTERM, -_SAVE)
_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # what Slurm and submitit announce an end by


class Task:
    """A training command in a task of a Slurm job: a child process, asked to save before the job is taken away.

    Slurm announces the end by SIGTERM, or, ahead of the time limit, by the signal that submitit has asked it for.
    Whether it also reaches the children of a task depends on the cluster's ProctrackType. So the child ignores these
    signals and is sent one that Slurm does not use, once.
    """

    def __init__(self, command: Sequence[str], cwd: Path):
        self.command, self.cwd = list(command), cwd

    def __call__(self) -> None:
        """Runs the command; a SystemExit with its status, unless that is 0 or it was stopped for the job's requeue."""
        self._told = self._requeued = False
        # Not in a process group of its own: some ProctrackTypes would lose it.
        self._child = subprocess.Popen(self.command, cwd=self.cwd, preexec_fn=_deaf_but_to_save)
        # Those that submitit hears: its handler of the signal ahead of the time limit queues the job again, and exits.
        self._handlers = {s: handler for s in _HEARD if callable(handler := signal.getsignal(s))}
        for s in self._handlers:
            signal.signal(s, self._on_signal)
        status = self._wait()
        for s, handler in self._handlers.items():
            signal.signal(s, handler)
        self._child.wait()
        if status and not self._requeued:
            sys.exit(status if status > 0 else 128 - status)

    def checkpoint(self):
        """What submitit submits in place of this task when it queues its job again: the same command, which resumes."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(Task(self.command, self.cwd))

    def _on_signal(self, signum, frame) -> None:
        if not self._told:
            self._told = True
            os.kill(self._child.pid, _SAVE)
        if signum != signal.SIGTERM and self._wait() in _STOPPED:
            self._requeued = True
            self._handlers[signum](signum, frame)  # in the first of several tasks it does not return

    def _wait(self) -> int:
        """The child's exit status, once it has ended; minus the signal that ended it.

        Popen.wait cannot be called in a handler that interrupts it; this leaves the child to be waited for.
        """
        end = os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _deaf_but_to_save() -> None:
    for s in _HEARD:
        signal.signal(s, signal.SIG_IGN)
    signal.signal(_SAVE, signal.SIG_DFL)


def launch(jobs: Sequence[Job], cwd: Path, width: int = 1, options: Mapping[str, str] | None = None) -> list[None]:
    """Submits those of `jobs` that are not with Slurm already, as an array job of which `width` run at a time.

    `options` are the parameters of submitit's executor, with or without its prefix slurm_. What submitit writes, the
    logs among it, and which run is which job (jobs.json) go to the hidden directory .slurm beside the run directories.
    """
    positive("--jobs", width)
    submitit = _submitit()
    folder = jobs[0].workdir.parent / ".slurm"
    parameters = {"name": folder.parent.name} | DEFAULTS | _parameters(submitit, options or {})
    if "time" in parameters:
        del parameters["timeout_min"]
    _alive()  # before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    with _jobs_file(folder) as ids:
        alive = _alive()
        for job in jobs:
            if (job_id := ids.get(job.name)) in alive:
                print(f"  {job.name}: queued as {job_id} ({alive[job_id]})")
        new = [job for job in jobs if ids.get(job.name) not in alive]
        if new:
            ids |= _submit(submitit, new, cwd, width, folder, parameters)
    for job in new:
        print(f"  {job.name}: submitted as {ids[job.name]}, log {folder}/{ids[job.name]}_0_log.out")
    print("watch them with: squeue --me")
    return [None] * len(jobs)


def _submitit():
    try:
        import submitit
    except ImportError:
        remedy = "needs the package submitit: python -m pip install submitit==1.5.4"
        raise UsageError("on", "slurm", remedy) from None
    for program in ("srun", "sbatch", "squeue"):
        if shutil.which(program) is None:
            raise UsageError("on", "slurm", f"needs {program}, and there is none on this machine's PATH")
    return submitit


def _parameters(submitit, options: Mapping[str, str]) -> dict[str, object]:
    """The options as the executor takes them, without the prefix slurm_. Raises UsageError for a name or a value."""
    types = dict(submitit.AutoExecutor._typed_parameters()) | dict.fromkeys(_INTEGERS, int) | _STRUCTURES
    known = {*types, *submitit.SlurmExecutor._valid_parameters()} - {"array_parallelism", "job_name"}
    parameters = {}
    for name, text in options.items():
        name = name.removeprefix("slurm_")
        if name == "array_parallelism":
            raise UsageError(f"slurm.{name}", text, "is what --jobs says; leave it out")
        one_of("slurm", name, sorted(known))
        wanted = types.get(name, str)
        try:
            parameters[name] = _value(wanted, text)
        except ValueError:
            shape = {list: "a JSON list", dict: "a JSON object"}.get(wanted, f"of type {wanted.__name__}")
            of = " (minutes)" if name in ("time", "timeout_min") else ""
            raise UsageError(f"slurm.{name}", text, f"must be {shape}{of}") from None
    return parameters


def _value(wanted: type, text: str) -> object:
    if wanted in (list, dict):
        value = json.loads(text)
        if not isinstance(value, wanted):
            raise ValueError
        return value
    if wanted is bool and text not in _WORDS:
        raise ValueError
    return _WORDS[text] if text in _WORDS else wanted(text)


def _submit(
    submitit, jobs: Sequence[Job], cwd: Path, width: int, folder: Path, parameters: dict[str, object]
) -> dict[str, str]:
    """Submits one array job -> the job id of each run. The tasks import this package, hence start in `cwd`."""
    parameters["additional_parameters"] = {"chdir": cwd, **parameters.get("additional_parameters", {})}
    shared = submitit.AutoExecutor._typed_parameters()
    executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=parameters.pop("max_num_timeout"))
    prefixed = {name if name in shared else f"slurm_{name}": value for name, value in parameters.items()}
    # What a job that this is called from was given is not for its own jobs.
    inside = submitit.helpers.clean_env() if "SLURM_JOB_ID" in os.environ else contextlib.nullcontext()
    try:
        with inside, contextlib.redirect_stderr(io.StringIO()):  # submitit prints sbatch's words besides
            executor.update_parameters(slurm_array_parallelism=width, **prefixed)
            with executor.batch():
                submitted = [executor.submit(Task(job.command, cwd)) for job in jobs]
    except submitit.core.utils.FailedJobError as e:  # sbatch's words
        raise UsageError("on", "slurm", f"sbatch refused the jobs: {first_line(e)}") from None
    return {job.name: s.job_id for job, s in zip(jobs, submitted, strict=True)}


def _alive() -> dict[str, str]:
    """The jobs of this user that are queued or run, and their states: {"12_0": "RUNNING"}."""
    command = ["squeue", "--me", "--array", "--noheader", "--format=%i %T"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or "-").splitlines()[-1].removeprefix("squeue: ")
        raise UsageError("on", "slurm", f"squeue gets no answer ({said}): run this where it does, as on a login node")
    return dict(line.split() for line in done.stdout.splitlines())


@contextlib.contextmanager
def _jobs_file(folder: Path) -> Iterator[dict[str, str]]:
    """The job id of each run, as jobs.json has it and then has it changed; one sweep at a time is in here."""
    with (folder / ".lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        file, temporary = folder / "jobs.json", folder / ".jobs.json.tmp"
        ids = json.loads(file.read_text()) if file.exists() else {}
        yield ids
        temporary.write_text(json.dumps(ids, indent=1))
        temporary.replace(file)
