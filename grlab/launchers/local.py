"""Runs jobs on this machine, `width` at a time, each on its own share of the cores."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from grlab.errors import RunFailed, UsageError
from grlab.launchers import Job

GRACE = 300.0  # seconds that a run is given to save its state after SIGTERM
POLL = 0.1  # seconds between looks at the running jobs
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stop:
    """The first signal asks the jobs to save and end; a second one, or the end of the grace, kills them."""

    def __init__(self):
        self.signum = None
        self.kill = False

    def on_signal(self, signum, frame):
        del frame
        self.kill = self.signum is not None
        self.signum = self.signum or signum


def launch(jobs: Sequence[Job], cwd: Path, width: int = 1, grace: float = GRACE) -> list[int]:
    """Runs `jobs` in order from the directory `cwd`; returns the exit status of each (minus the signal that ended it).

    Up to `width` jobs run at once. With more than one, each gets its own cores and GPUs: a small model trains faster on
    one core than two of them do sharing two. The jobs write to this process's stdout and stderr. A job that fails does
    not stop the others. SIGINT, SIGTERM or SIGHUP sends the running jobs SIGTERM, waits at most `grace` seconds for
    them to save their state, kills them after that or at the second signal, and raises RunFailed.
    """
    shares, gpus = _shares(width), _gpu_shares(width)
    stop = _Stop()
    # What nohup or a shell's & has set to be ignored stays ignored.
    before = {s: signal.signal(s, stop.on_signal) for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN}
    statuses: list[int | None] = [None] * len(jobs)
    waiting = list(enumerate(jobs))
    running: dict[int, tuple[int, subprocess.Popen]] = {}  # by the share of the cores that they have
    try:
        while running or (waiting and not stop.signum):
            for share in range(width):
                if share not in running and waiting and not stop.signum:
                    index, job = waiting.pop(0)
                    print(f"[{index + 1}/{len(jobs)}] {job.name}", flush=True)
                    # A process group of its own: Ctrl-C reaches the job once, from here, and a kill its own children.
                    can_pin = width > 1 and hasattr(os, "sched_setaffinity")
                    pin = (lambda cores=shares[share]: os.sched_setaffinity(0, cores)) if can_pin else None
                    env = os.environ | ({"CUDA_VISIBLE_DEVICES": gpus[share]} if gpus else {})
                    process = subprocess.Popen(job.command, cwd=cwd, process_group=0, preexec_fn=pin, env=env)
                    running[share] = index, process
            _wait(running, statuses, stop, grace)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
    if stop.signum:
        raise RunFailed(f"stopped by {signal.Signals(stop.signum).name}; the same command goes on from here")
    return statuses


def _wait(running: dict, statuses: list, stop: _Stop, grace: float) -> None:
    """Returns once a job has ended; once all have, where a signal asked for the end."""
    deadline = None
    while running:
        for share, (index, process) in list(running.items()):
            if (status := process.poll()) is not None:
                statuses[index] = status
                del running[share]
                if not stop.signum:
                    return
        if stop.signum and deadline is None:
            deadline = time.monotonic() + grace
            _signal(running, signal.SIGTERM)
        if deadline and (stop.kill or time.monotonic() > deadline):
            _signal(running, signal.SIGKILL)
        time.sleep(POLL)


def _signal(running: dict, signum: int) -> None:
    for _, process in running.values():
        with contextlib.suppress(ProcessLookupError):
            if signum == signal.SIGKILL:
                os.killpg(process.pid, signum)
            else:
                os.kill(process.pid, signum)


def _shares(width: int) -> list[set[int]]:
    """The cores this process may use, dealt out to `width` jobs."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count()))
    if not 1 <= width <= len(cores):
        raise UsageError("--jobs", width, f"must lie in 1 .. {len(cores)}, the cores there are")
    size = len(cores) // width  # the same for every job, so that their speeds compare
    return [set(cores[share::width][:size]) for share in range(width)]


def _gpu_shares(width: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each of several jobs; empty where one job has everything, or there are no GPUs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    driver = Path("/proc/driver/nvidia/gpus")
    count = len(list(driver.iterdir())) if driver.is_dir() else 0
    gpus = named.split(",") if named else [str(i) for i in range(count)]
    if width == 1 or not gpus:
        return []
    if width > len(gpus):
        raise UsageError("--jobs", width, f"must lie in 1 .. {len(gpus)}, the GPUs there are")
    size = len(gpus) // width
    return [",".join(gpus[share::width][:size]) for share in range(width)]
