"""Sweeps on a real Slurm of one node, and the launcher's part of them by itself.

Seen to fail: the signal sent to the child twice; USR2 let through to it; jobs not looked for in the queue.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import launch
from grlab import sweep
from grlab.config import ROOT
from grlab.errors import UsageError
from grlab.experiment import load
from grlab.launchers import slurm as launcher
from tests import rows

submitit = pytest.importorskip("submitit")
EXPERIMENT = """
from grlab.experiment import Experiment, Row
EXPERIMENT = Experiment("one", "One row", "prenorm", (Row("prenorm", "configs/prenorm.py", "Pre-norm"),))
"""
# Long enough to be caught in its midst, and without a checkpoint before its end.
STEPS = 100
LONG = [f"steps={STEPS}", "seq_len=128", "batch_size=8", f"eval.every={STEPS}", f"checkpoint.every={STEPS}"]


class Sweep:
    """The command `sweep --on=slurm` on the cluster of the tests."""

    def __init__(self, directory: Path, capfd, experiment: str, *arguments: str):
        self.runs, self.capfd = directory / "runs", capfd
        self.argv = ["sweep", f"--experiment={experiment}", "--scale=tiny", f"--runs={self.runs}", "--on=slurm"]
        data = ["name=folder", f"path={rows.data_path(directory)}", "glob=*.py", f"dir={directory / 'prepared'}"]
        self.argv += [f"--config.data.{field}" for field in (*data, "heldout=0.2")] + ["--config.wandb.mode=disabled"]
        self.argv += ["--jobs=2", "--slurm.timeout_min=10", *arguments]

    def __call__(self, *more: str) -> str:
        """Runs the command -> what it prints."""
        self.capfd.readouterr()
        assert launch.main([*self.argv, *more]) == 0
        return self.capfd.readouterr().out

    def jobs(self) -> dict[str, str]:
        return json.loads((self.runs / ".slurm/jobs.json").read_text())

    def log(self, job: str, task: int = 0) -> str:
        return (self.runs / f".slurm/{job}_{task}_log.out").read_text()

    def records(self, name: str) -> list[dict]:
        file = self.runs / name / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def until(self, condition, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            logs = "\n".join(log.read_text()[-2000:] for log in self.runs.glob(".slurm/*.out"))
            assert time.monotonic() < deadline, shell("squeue") + logs
            time.sleep(0.1)

    def until_empty(self) -> None:
        self.until(lambda: not shell("squeue", "--noheader"))


def shell(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def on_slurm(slurm, monkeypatch, tmp_path, capfd):
    """on_slurm(experiment, argument, ...) -> that Sweep."""
    monkeypatch.setenv("SLURM_CONF", str(slurm))
    return lambda *arguments: Sweep(tmp_path, capfd, *arguments)


def test_a_sweep_is_one_array_job_and_its_table(on_slurm):
    """Two rows at two seeds; the same command while they are with Slurm, and after, submits nothing."""
    sweep = on_slurm("experiments/demo.py", "--seeds=2")
    out, jobs = sweep(), sweep.jobs()
    assert list(jobs) == ["prenorm-0", "gr-0", "prenorm-1", "gr-1"]
    assert len({job.split("_")[0] for job in jobs.values()}) == 1
    for name, job in jobs.items():
        assert f"{name}: submitted as {job}, log {sweep.runs}/.slurm/{job}_0_log.out" in out
    again = sweep()
    assert "submitted" not in again and "4 runs are not waited for" in again
    assert all(f"{name}: queued as {job} (" in again for name, job in jobs.items())
    assert len(shell("squeue", "--noheader", "--array").splitlines()) == 4
    sweep.until_empty()
    assert "gr-1: step 8, held-out loss" in sweep.log(jobs["gr-1"])
    assert launch.main(["table", "--experiment=experiments/demo.py", f"--runs={sweep.runs}"]) == 0
    table = sweep.capfd.readouterr().out
    assert "nats per byte" in table
    done = sweep()
    assert "4 runs, 0 to do" in done and table in done and sweep.jobs() == jobs


@pytest.mark.parametrize(
    ("take", "tasks"), [(("scontrol", "requeue"), 1), (("scancel", "--signal=USR2"), 2)], ids=["requeue", "time_limit"]
)
def test_a_run_whose_job_is_taken_away_goes_on_where_it_was(on_slurm, tmp_path, take, tasks):
    """One process by Slurm's requeue, two by the signal that submitit has Slurm send ahead of the time limit.

    No checkpoint is due before the end of the run: it goes on from what it saved when it was told to, or from nothing.
    """
    (tmp_path / "one.py").write_text(EXPERIMENT)
    fields = [f"--config.{field}" for field in LONG]
    sweep = on_slurm(str(tmp_path / "one.py"), "--seeds=1", f"--slurm.tasks_per_node={tasks}", *fields)
    sweep()
    ((run, job),) = sweep.jobs().items()
    sweep.until(lambda: len(sweep.records(run)) >= 5)
    shell(*take, job)
    sweep.until_empty()
    record = json.loads((sweep.runs / run / "provenance.json").read_text())
    assert record["processes"] == tasks
    (resumed,) = record["resumed"]
    assert 5 <= resumed["step"] < STEPS
    for task in range(tasks):
        assert f"at step {resumed['step']}, which is saved" in sweep.log(job, task)
    assert ("Requeued job" in sweep.log(job)) == (take[0] == "scancel")  # by submitit
    assert json.loads((sweep.runs / run / "final_result.json").read_text())["status"] == "done"
    assert [r["step"] for r in sweep.records(run) if "eval" not in r] == list(range(1, STEPS + 1))


def test_what_sbatch_refuses_is_one_line(on_slurm, capfd):
    sweep = on_slurm("experiments/demo.py", "--seeds=1", "--slurm.partition=none")
    assert launch.main(sweep.argv) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: on='slurm': sbatch refused") and "partition" in err and err.count("\n") == 1
    assert not (sweep.runs / ".slurm/jobs.json").exists()


# By itself

NOTES = """
import pathlib, signal, sys, time
def save(*_):
    with open("saved", "a") as f: f.write("saved ")
    time.sleep(0.3)
    raise SystemExit({status})
signal.signal(signal.SIGINT, save)
pathlib.Path("ready").touch()
time.sleep(60)
"""
PARENT = """
import pickle, signal, sys
def requeue(signum, frame):
    open("requeued", "w").close()
    {after}
signal.signal(signal.SIGUSR2, requeue)
signal.signal(signal.SIGTERM, lambda *_: None)
pickle.load(open("task", "rb"))()
"""


def announce(directory, sent, group=False, status=128 + signal.SIGINT, after="sys.exit(255)"):
    """Runs a task whose child saves when it is told to, and sends the task's process (or all of them) `sent`."""
    task = launcher.Task([sys.executable, "-c", NOTES.format(status=status)], directory)
    (directory / "task").write_bytes(pickle.dumps(task))
    command = [sys.executable, "-c", PARENT.format(after=after)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(command, cwd=directory, env=env, process_group=0)
    while not (directory / "ready").exists():
        assert parent.poll() is None
        time.sleep(0.02)
    for s in sent:
        (os.killpg if group else os.kill)(parent.pid, s)
    status = parent.wait(timeout=20)
    assert (directory / "saved").read_text() == "saved "
    return status, (directory / "requeued").exists()


@pytest.mark.parametrize("group", [False, True], ids=["task_alone", "and_its_children"])
def test_a_task_has_its_child_save_once_whoever_slurm_signals(tmp_path, group):
    assert announce(tmp_path, [signal.SIGTERM, signal.SIGTERM], group) == (130, False)


@pytest.mark.parametrize("group", [False, True], ids=["task_alone", "and_its_children"])
def test_a_task_is_queued_again_once_its_child_has_saved(tmp_path, group):
    assert announce(tmp_path, [signal.SIGUSR2], group) == (255, True)


def test_a_child_that_another_process_of_its_run_has_told_is_as_one_that_was_told(tmp_path):
    assert announce(tmp_path, [signal.SIGUSR2], status=128 + signal.SIGTERM) == (255, True)


def test_a_task_that_is_not_the_first_of_its_job_ends_well(tmp_path):
    """Submitit queues the job again in the first task alone, and an end with an error may take that one along."""
    assert announce(tmp_path, [signal.SIGUSR2], after="return") == (0, True)


def test_a_run_that_ends_by_itself_is_not_queued_again(tmp_path):
    assert announce(tmp_path, [signal.SIGUSR2], status=1) == (1, False)


def test_a_task_ends_with_the_status_of_its_command(tmp_path):
    launcher.Task([sys.executable, "-c", ""], tmp_path)()
    with pytest.raises(SystemExit) as e:
        launcher.Task([sys.executable, "-c", "raise SystemExit(3)"], tmp_path)()
    assert e.value.code == 3


def test_what_submitit_submits_again_is_the_same_command(tmp_path):
    task = launcher.Task([sys.executable, "-c", ""], tmp_path)
    task()
    again = pickle.loads(pickle.dumps(task.checkpoint())).function
    assert (again.command, again.cwd) == (task.command, tmp_path)


def test_options_as_the_executor_takes_them():
    given = {"partition": "gpu", "nodes": "2", "slurm_mem_gb": "1.5", "exclusive": "true", "time": "60"}
    given |= {"setup": '["module load cuda"]', "additional_parameters": '{"mail-type": "END"}'}
    assert launcher._parameters(submitit, given) == {
        "partition": "gpu", "nodes": 2, "mem_gb": 1.5, "exclusive": True, "time": 60,
        "setup": ["module load cuda"], "additional_parameters": {"mail-type": "END"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("partitoin", "gpu", "slurm='partitoin': did you mean 'partition'?"),
        ("nodes", "two", "slurm.nodes='two': must be of type int"),
        ("timeout_min", "1-00:00:00", "must be of type int (minutes)"),
        ("setup", "module load cuda", "must be a JSON list"),
        ("setup", "{}", "must be a JSON list"),
        ("array_parallelism", "4", "is what --jobs says"),
    ],
)
def test_wrong_options(name, text, line):
    with pytest.raises(UsageError) as e:
        launcher._parameters(submitit, {name: text})
    assert line in str(e.value)


def test_without_submitit_or_slurm(tmp_path, monkeypatch):
    jobs = []
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "submitit", None)
        with pytest.raises(UsageError, match="pip install submitit=="):
            launcher.launch(jobs, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="needs srun"):
        launcher.launch(jobs, tmp_path)


def test_a_slurm_that_does_not_answer(tmp_path, monkeypatch):
    """One line with the way out, and nothing written."""
    for program in ("srun", "sbatch", "squeue"):
        (tmp_path / program).write_text("#!/bin/sh\necho 'squeue: error: Unknown host' >&2\nexit 1\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    job = sweep.plan(load("experiments/demo.py"), "tiny", (0,), tmp_path / "runs")[0]
    with pytest.raises(UsageError, match="squeue gets no answer .*Unknown host.*: run this where it does"):
        launcher.launch([job], ROOT)
    assert not (tmp_path / "runs").exists()
