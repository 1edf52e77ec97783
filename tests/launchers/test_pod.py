"""What is written for SkyPilot and printed for gcloud."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml

import launch
from grlab import sweep
from grlab.config import ROOT
from grlab.errors import UsageError
from grlab.experiment import load
from grlab.launchers import pod

OPTIONS = {"accelerators": "tpu-v5p-16", "bucket": "gs://my-runs", "zone": "us-east5-a", "use_spot": "true"}
OPTIONS |= {"topology": "none"}


def runs(tmp_path):
    return sweep.plan(load("experiments/demo.py"), "tiny", (0,), tmp_path / "demo", ["steps=5"])


@pytest.fixture
def files(tmp_path):
    jobs = runs(tmp_path)
    assert pod.launch(jobs, ROOT, options=OPTIONS | {"runtime_version": "v2-alpha-tpuv5"}) == [None, None]
    folder = tmp_path / "demo" / ".pod"
    return [folder / "prenorm-0.yaml", folder / "gr-0.yaml"]


def test_a_task_file_runs_the_same_command_in_the_bucket(files, tmp_path):
    written = [yaml.safe_load(file.read_text()) for file in files]
    for task, run in zip(written, runs(tmp_path), strict=True):
        assert task["name"] == f"demo-{run.name}" and task["workdir"] == str(ROOT)
        assert task["resources"] == {
            "accelerators": "tpu-v5p-16", "zone": "us-east5-a", "use_spot": True,
            "accelerator_args": {"runtime_version": "v2-alpha-tpuv5"},
        }  # fmt: skip
        assert task["file_mounts"] == {"/grlab-runs": {"source": "gs://my-runs", "mode": "MOUNT"}}
        python, *arguments = shlex.split(task["run"])
        there = [a.replace(str(tmp_path), "/grlab-runs") for a in run.command[1:]]
        assert (python, arguments) == ("~/grlab-env/bin/python", there)
        assert f"--workdir=/grlab-runs/demo/{run.name}" in arguments and "--config.steps=5" in arguments
        jax = re.search(r"^jax==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE).group(1)
        assert f"-r requirements.txt 'jax[tpu]=={jax}'" in task["setup"]


def test_gpus_get_their_own_jax(tmp_path):
    run = runs(tmp_path)[0]
    assert "'jax[cuda12]==" in pod.task(run, ROOT, {"accelerators": "H100:8", "bucket": "gs://b"})["setup"]


@pytest.mark.skipif(not importlib.util.find_spec("sky"), reason="the package skypilot is not installed")
def test_skypilot_reads_what_is_written(files):
    import sky

    for file in files:
        task = sky.Task.from_yaml(str(file))
        (resources,) = task.resources
        assert (
            resources.use_spot and resources.accelerators == {"tpu-v5p-16": 1} and "/grlab-runs" in task.storage_mounts
        )
    bad = yaml.safe_load(files[0].read_text()) | {"rsources": {}}
    files[0].write_text(json.dumps(bad))
    with pytest.raises(UsageError, match="SkyPilot refuses"):
        pod._check(files[0])


def test_the_commands_that_launch_are_printed(files, capfd, tmp_path):
    pod.launch(runs(tmp_path), ROOT, options=OPTIONS)
    out = capfd.readouterr().out
    assert all(f"  sky jobs launch --yes --detach-run {file}\n" in out for file in files)
    assert f"gcloud storage rsync --recursive gs://my-runs/demo {tmp_path / 'demo'}" in out


TPU = ["--pod.accelerators=tpu-v5p-16", "--pod.bucket=gs://x"]
SWEEP = ["sweep", "--experiment=experiments/demo.py", "--scale=tiny", "--seeds=1", "--on=pod"]


def test_the_runs_as_gcloud_commands(capsys, tmp_path):
    argv = [*SWEEP, f"--runs={tmp_path / 'runs'}", "--print", "--pod.name=my-pod"]
    argv += ["--pod.zone=us-east5-a", "--pod.topology=none"]
    assert launch.main(argv) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("gcloud")]
    assert len(lines) == 2 and not any(tmp_path.iterdir())
    for line, name in zip(lines, ("prenorm-0", "gr-0"), strict=True):
        assert line[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "my-pod"]
        assert line[6:8] == ["--zone=us-east5-a", "--worker=all"]
        command = line[8].removeprefix("--command=")
        assert command.startswith("cd ~/grlab && ~/grlab-env/bin/python launch.py train --config=configs/")
        assert f"--workdir={tmp_path / 'runs' / name}" in command


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "needs --pod.accelerators"),
        (["--pod.accelerators=tpu-v5p-16"], "needs --pod.bucket, such as --pod.bucket=gs://my-runs"),
        (["--print", "--pod.name=x"], "needs --pod.zone"),
        (["--print", "--pod.name=x", "--pod.zone=x"], "needs --pod.topology, such as --pod.topology=v5p:2x2x2"),
        (["--pod.accelerators=tpu-v5p-16", "--pod.bucket=gs://x"], "needs --pod.topology"),
        (TPU + ["--pod.topology=v5x:2x2"], "topology='v5x:2x2': "),
        (
            TPU + ["--pod.topology=v5p:2x2x1"],
            "pod.topology='v5p:2x2x1': is tpu-v5p-8, and --pod.accelerators=tpu-v5p-16",
        ),
        (["--print", "--pod.bucket=gs://x"], "pod='bucket': known: name, zone, project, topology"),
        (["--pod.acelerators=x"], "pod='acelerators': did you mean 'accelerators'?"),
        (["--pod.use_spot=maybe"], "pod.use_spot='maybe': must be of type bool"),
        (["--pod.bucket=x"], "pod.bucket='x': must be the address of a bucket"),
        (["--pod.bucket"], "--pod.bucket='': give it a value"),
        (["--jobs=2"], "--jobs=2"),
        (
            [*TPU, "--pod.topology=none", "--config.data.tokenizer=/t/a.json"],
            "config.data.tokenizer='/t/a.json': is not",
        ),
        ([*TPU, "--pod.topology=none", "--config.data.path=../text"], "config.data.path='../text': is not in the repo"),
        (["--slurm.partition=gpu"], "--slurm.partition='gpu': is an option of --on=slurm; this sweep is --on=pod"),
    ],
)
def test_mistakes(arguments, line, tmp_path, capsys):
    assert launch.main([*SWEEP, f"--runs={tmp_path}", *arguments]) == 2
    err = capsys.readouterr().err
    assert line in err and err.startswith("error: ") and err.count("\n") == 1


def test_options_are_their_launchers_alone(tmp_path, capsys):
    local = [a for a in SWEEP if a != "--on=pod"]
    for argument in ("--slurm.partition=gpu", "--pod.zone=x", "--print"):
        assert launch.main([*local, f"--runs={tmp_path}", argument]) == 2
        assert "this sweep is --on=local" in capsys.readouterr().err


def test_a_row_that_does_not_fit_is_refused(tmp_path):
    """In a process of its own: the compiler has to know its target before JAX starts."""
    experiment = tmp_path / "large.py"
    demo = (ROOT / "experiments" / "demo.py").read_text()
    experiment.write_text(demo.replace('"GR")', '"GR", overrides={"residual.rank": 2**24})'))
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}

    def run(experiment):
        argv = ["sweep", f"--experiment={experiment}", "--scale=tiny", "--seeds=2", f"--runs={tmp_path / 'runs'}"]
        argv += ["--on=pod", "--print", "--pod.name=my-pod", "--pod.zone=x", "--pod.topology=v5e:2x2"]
        return subprocess.run(
            [sys.executable, "launch.py", *argv], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )

    refused = run(experiment)
    assert refused.returncode == 2 and "gcloud" not in refused.stdout
    *_, line = refused.stderr.splitlines()
    assert re.fullmatch(r"error: pod\.topology='v5e:2x2': a chip has 16 GiB, .* too little for gr \([\d.]+ GiB\)", line)
    taken = run("experiments/demo.py")
    assert taken.returncode == 0 and taken.stdout.count("gcloud compute") == 4
    assert taken.stderr.count("compiling for v5e:2x2") == 2  # each row once
