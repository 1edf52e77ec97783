"""A run of two processes is the run of one, in its losses, its files and its stops.

Seen to fail: each process given the first rows of the batch for its own; a signal that only the process it came to
looks at.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from grlab import distributed
from grlab.config import ROOT
from grlab.errors import UsageError
from grlab.train import loop
from tests import rows

# Two processes of two devices each: the devices of the other process lie along the first axis.
MESH = ("mesh.data=2", "mesh.fsdp=2")


@pytest.fixture
def corpus(tmp_path):
    """The overrides of a run on a small corpus."""
    data = ["data.name=folder", f"data.path={rows.data_path(tmp_path)}", "data.glob=*.py", "data.heldout=0.2"]
    return [*data, f"data.dir={tmp_path / 'prepared'}", "eval.cloze_items=0"]


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(workdir, overrides, processes=2, only=None, port=None, **more):
    """The processes of one run of the row gr, started."""
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=2"
    fields = [f"--config.{o}" for o in overrides]
    command = [sys.executable, "launch.py", "train", "--config=configs/gr.py:tiny", f"--workdir={workdir}", *fields]
    command += [f"--coordinator=localhost:{port or free_port()}", f"--processes={processes}"]
    command += [f"--{name}={value}" for name, value in more.items()]
    return [
        subprocess.Popen(
            [*command, f"--process_id={i}"],
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in (range(processes) if only is None else only)
    ]


def ends(started, timeout=300):
    """(exit status, what it printed) of each."""
    return [(p.wait(timeout), p.stdout.read()) for p in started]


def losses(workdir):
    """The loss of every update on record."""
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: r["loss"] for r in records if "eval" not in r}


def wait_for_step(workdir, step, timeout=120):
    """Returns once update `step` is on record."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if (workdir / "metrics.jsonl").exists() and max(losses(workdir), default=0) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} not reached in {timeout} s")


def test_two_processes_train_as_one_and_each_goes_on_for_the_other(corpus, tmp_path):
    """The same losses within 1e-5, the same files, one wandb run; 2 -> 1 and 1 -> 2 processes from a checkpoint."""
    two, one = tmp_path / "two", tmp_path / "one"
    for status, said in ends(start(two, [*corpus, *MESH])):
        assert status == 0, said
    loop.train(rows.tiny("gr", *corpus), one)
    np.testing.assert_allclose(list(losses(two).values()), list(losses(one).values()), rtol=1e-5)
    assert {p.name for p in two.iterdir()} == {p.name for p in one.iterdir()}
    assert len(list((two / "wandb").glob("offline-run-*"))) == 1
    provenance = json.loads((two / "provenance.json").read_text())
    assert (provenance["processes"], provenance["device_count"]) == (2, 4)
    results = [json.loads((run / "final_result.json").read_text()) for run in (one, two)]
    np.testing.assert_allclose(results[1]["val_loss"], results[0]["val_loss"], rtol=1e-5)
    assert set(results[0]) == set(results[1])

    for came_from, name in ((two, "shrunk"), (one, "grown")):
        shutil.copytree(came_from, tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "8")
        (tmp_path / name / "final_result.json").unlink()
    loop.train(rows.tiny("gr", *corpus), tmp_path / "shrunk")
    for status, said in ends(start(tmp_path / "grown", [*corpus, *MESH])):
        assert status == 0, said
    for name in ("shrunk", "grown"):
        np.testing.assert_allclose(list(losses(tmp_path / name).values()), list(losses(one).values()), rtol=1e-5)


def test_processes_with_different_configs_are_refused(corpus, tmp_path):
    """One line in each, before there is a run directory."""
    port, run = free_port(), tmp_path / "run"
    mine = start(run, [*corpus, *MESH], only=[0], port=port)
    other = start(run, [*corpus, *MESH, "optim.lr=5e-3"], only=[1], port=port)
    (status, said), (other_status, other_said) = ends([*mine, *other])
    assert (status, other_status) == (2, 2), said + other_said
    assert "error: config.optim.lr=0.005: the first process has 0.003: start all of them by the same" in other_said
    assert "error: process=0: another process" in said and not run.exists()


def test_a_killed_process_ends_the_other_and_a_stopped_one_takes_it_along(corpus, tmp_path):
    """A kill: a clear message within a minute. A signal: both save the same step. What follows is the run unbroken."""
    fields = [*corpus, *MESH, "steps=240", "checkpoint.every=20", "eval.every=240"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert [status for status, _ in ends(start(whole, fields))] == [0, 0]

    started = start(broken, fields)
    wait_for_step(broken, 60)
    killed = time.monotonic()
    started[1].kill()
    status, said = started[0].wait(60), started[0].stdout.read()
    assert (status, time.monotonic() - killed < 60) == (1, True)
    assert "failed: process 0 of 2: another process has ended" in said.splitlines()[-1]

    started = start(broken, fields)
    wait_for_step(broken, 100)
    started[1].send_signal(signal.SIGTERM)
    said = [said.splitlines()[-1] for status, said in ends(started) if status == 128 + signal.SIGTERM]
    at = {line.partition(" at ")[2] for line in said}
    assert len(said) == 2 and len(at) == 1 and "which is saved" in said[0]

    assert [status for status, _ in ends(start(broken, fields))] == [0, 0]
    assert losses(broken) == losses(whole)  # bit for bit
    first, second = (r["step"] for r in json.loads((broken / "provenance.json").read_text())["resumed"])
    assert first % 20 == 0 and first >= 40 and f"at step {second}," in said[0]


def test_a_process_whose_others_do_not_come_says_so(corpus, tmp_path):
    """It ends with status 1 after --wait seconds, whether it is the coordinator or not."""
    for process in (0, 1):
        ((status, said),) = ends(start(tmp_path / "run", corpus, only=[process], wait=3))
        assert status == 1
        last = said.splitlines()[-1]
        assert f"failed: process {process} of 2: waited 3 s for the others at localhost:" in last
        assert "--wait" in last
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags, named",
    [
        ({"processes": 2}, "--coordinator=''"),
        ({"coordinator": "a:1", "processes": 2}, "--process_id=''"),
        ({"coordinator": "a:1", "processes": 2, "process_id": 2}, "--process_id=2: must lie in 0 .. 1"),
        ({"coordinator": "a", "processes": 2, "process_id": 1}, "--coordinator='a': must be host:port"),
    ],
)
def test_wrong_flags_are_one_line(flags, named):
    """Nothing is waited for."""
    given = dict.fromkeys(("coordinator", "processes", "process_id")) | flags
    with pytest.raises(UsageError, match=named.replace(".", r"\.")):
        distributed.start(**given, wait=1)


@pytest.mark.parametrize(
    "environment, method",
    [
        ({}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, None),  # the batch script, not a step
        ({"SLURM_STEP_NUM_TASKS": "2"}, "slurm"),
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "ompi"),
    ],
)
def test_what_started_the_processes_is_found(environment, method):
    """By what it leaves in the environment."""
    assert distributed._started_by(environment) == method


@pytest.mark.parametrize(("tasks", "nodes", "gpus"), [(2, 2, [0, 1, 2, 3]), (8, 2, None), (None, None, None)])
def test_a_task_that_is_alone_on_its_node_has_all_gpus_of_it(tasks, nodes, gpus):
    environment = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    if tasks is not None:
        environment |= {"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(nodes)}
    assert distributed._gpus_of_a_node(environment) == gpus
    assert distributed._gpus_of_a_node(environment | {"CUDA_VISIBLE_DEVICES": ""}) is None
