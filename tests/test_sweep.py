import json
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from grlab import launchers, sweep
from grlab.config import ROOT, differences, parse_seeds
from grlab.errors import RunFailed, UsageError
from grlab.experiment import Experiment, Row, load, rate_grid
from grlab.launchers import local, slurm
from grlab.train.rundir import RunDir

PAIR = Experiment(
    name="pair",
    title="Two rows",
    baseline="prenorm",
    rows=(Row("prenorm", "configs/prenorm.py", "Pre-norm"), Row("gr", "configs/gr.py", "GR", {"optim.lr": 2e-3})),
)
GATE = {"residual.gated_norm": 8}


def plan(runs_dir, seeds=(0, 1), extra=(), experiment=PAIR):
    return sweep.plan(experiment, "tiny", seeds, runs_dir, extra)


def leave(run, status=None, config=None, step=8):
    """Leaves the directory of a run that ended with `status`, or did not end."""
    run.workdir.mkdir(parents=True, exist_ok=True)
    (run.workdir / "config.json").write_text(json.dumps(config or run.config))
    (run.workdir / "provenance.json").write_text("{}")
    if status:
        final = {"status": status, "step": step, "val_loss": 1.5, "val_bpb": 2.0}
        final |= {"benchmarks": {}, "tokens_per_s": None}
        if status == "diverged":
            final = {"status": status, "step": step, "reason": "not finite at step 8"}
        (run.workdir / "final_result.json").write_text(json.dumps(final))


# Experiments


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.py")), ids=lambda p: p.stem)
def test_rows_differ_from_their_baseline_in_what_they_declare_alone(path, tmp_path):
    experiment = load(path)
    assert experiment.name == path.stem
    for scale in ("tiny", "cpu"):
        configs = {run.row.name: run.config for run in sweep.plan(experiment, scale, (3,), tmp_path)}
        for row in experiment.rows:
            found = differences(configs[row.name], configs[experiment.baseline])
            assert all(experiment.may_differ(row, field) for field in found), (row.name, found)
            assert configs[row.name]["seed"] == 3 and configs[row.name]["wandb"]["group"] == experiment.name


def test_published_averages_are_those_of_the_nine_benchmarks():
    for row in load("experiments/table5.py").rows:
        nine = [value for name, value in row.published.items() if name not in ("loss", "average")]
        assert len(nine) == 9
        assert sum(nine) / 9 == pytest.approx(row.published["average"], abs=0.01)


def test_every_row_is_given_the_same_learning_rates():
    rates = {}
    for row in load("experiments/lr_table5.py").rows:
        rates.setdefault(row.config, []).append(row.overrides["optim.lr"])
    assert set(rates) == {row.config for row in load("experiments/table5.py").rows}
    (grid,) = {tuple(sorted(r)) for r in rates.values()}
    assert len(set(grid)) == len(grid) >= 4


def test_a_rate_grid_is_every_row_at_every_rate():
    grid = rate_grid(PAIR, ("1e-2", "3e-3"), steps=7)
    assert [row.name for row in grid.rows] == ["prenorm@1e-2", "gr@1e-2", "prenorm@3e-3", "gr@3e-3"]
    assert grid.rows[3].overrides == {"optim.lr": 3e-3, "steps": 7} and grid.baseline == "prenorm@1e-2"


def test_errors_of_experiments(tmp_path):
    with pytest.raises(UsageError, match="did you mean 'experiments/table5.py'"):
        load("experiments/tabel5.py")
    (tmp_path / "empty.py").write_text("ROWS = ()\n")
    with pytest.raises(UsageError, match="must define EXPERIMENT"):
        load(tmp_path / "empty.py")
    gr = Row("gr", "configs/gr.py", "GR")
    with pytest.raises(UsageError, match="two rows have this name"):
        Experiment("x", "X", "gr", (gr, gr))
    with pytest.raises(UsageError, match="did you mean 'gr'"):
        Experiment("x", "X", "grr", (gr,))
    with pytest.raises(UsageError, match="names a directory"):
        Experiment("x", "X", "a/b", (Row("a/b", "configs/gr.py", "GR"),))


# Plans


@pytest.mark.parametrize(("text", "seeds"), [("3", (0, 1, 2)), ("0,1,5", (0, 1, 5)), ("1000,", (1000,))])
def test_seeds(text, seeds):
    assert parse_seeds("--seeds", text) == seeds


@pytest.mark.parametrize("text", ["", "0", "-1", "a", "1,1", "1,-2", ",", "1.5"])
def test_wrong_seeds(text):
    with pytest.raises(UsageError, match="^--seeds="):
        parse_seeds("--seeds", text)


def test_a_plan_goes_seed_by_seed_and_its_command_resolves_to_its_config(tmp_path):
    runs = plan(tmp_path, extra=["steps=5"])
    assert [run.name for run in runs] == ["prenorm-0", "gr-0", "prenorm-1", "gr-1"]
    assert runs[3].command == [
        sys.executable, "launch.py", "train", "--config=configs/gr.py:tiny", f"--workdir={tmp_path / 'gr-1'}",
        "--config.seed=1", "--config.optim.lr=0.002", "--config.steps=5",
        "--config.row=gr", "--config.wandb.group=pair",
    ]  # fmt: skip
    config = runs[3].config
    assert (config["seed"], config["optim"]["lr"], config["steps"], config["scale"]) == (1, 2e-3, 5, "tiny")
    assert config["residual"]["kind"] == "gr"
    inside = plan(ROOT / "runs" / "x")[0]
    assert "--workdir=runs/x/prenorm-0" in inside.command


def test_what_the_experiment_sets_cannot_be_overridden(tmp_path):
    for override in ("optim.lr=1e-3", "seed=4", "wandb.group=mine", "residual.kind=gr"):
        with pytest.raises(UsageError, match="leave it out"):
            plan(tmp_path, extra=[override])
    with pytest.raises(UsageError, match="stepz"):
        plan(tmp_path, extra=["stepz=4"])


def test_a_row_that_differs_in_more_than_it_declares_is_refused(tmp_path):
    unfair = Row("gr", "configs/gr.py", "GR", {"steps": 9})
    with pytest.raises(UsageError, match="gr: steps=9: prenorm has 8"):
        plan(tmp_path, experiment=Experiment("x", "X", "prenorm", (PAIR.rows[0], unfair)))


def test_what_a_row_may_differ_in():
    """What it overrides or declares, and where its config is another one, all that makes a system what it is."""
    switch = {"residual.read": "scalar", "steps": 9}
    gr, scalar = Row("gr", "configs/gr.py", "GR"), Row("s", "configs/gr.py", "S", switch, differs=("seq_len",))
    prenorm, gated = (Row(name, "configs/prenorm.py", name, o) for name, o in (("p", {}), ("g", GATE)))
    fields = ("row", "residual.read", "residual.kind", "optim.lr", "residual.gated_norm", "steps", "seq_len")

    def found(row, baseline):
        experiment = Experiment("x", "X", baseline.name, (gr, scalar, prenorm, gated))
        return [field for field in fields if experiment.may_differ(row, field)]

    assert found(scalar, gr) == ["row", "residual.read", "seq_len"]
    assert found(gr, gr) == ["row"]
    assert found(gr, scalar) == ["row", "residual.read"]
    assert found(prenorm, gr) == ["row", "residual.read", "residual.kind", "optim.lr"]
    assert found(gated, gr) == [*found(prenorm, gr), "residual.gated_norm"] == found(gr, gated)


# States


def test_states(tmp_path):
    run = plan(tmp_path)[1]
    assert sweep.state(run) == ("missing", "")
    run.workdir.mkdir()
    assert sweep.state(run).kind == "missing"
    leave(run)
    assert sweep.state(run).kind == "unfinished"
    ends = {"done": "done at step 8", "diverged": "diverged not finite at step 8", "x": "failed at step 8"}
    for status, expected in ends.items():
        leave(run, status)
        assert " ".join(sweep.state(run)) == expected


@pytest.mark.parametrize("status", [None, "done", "diverged"])
def test_a_directory_of_another_config_is_foreign(tmp_path, status):
    run = plan(tmp_path)[1]
    leave(run, status, run.config | {"steps": 7})
    assert sweep.state(run) == ("foreign", "it was made with steps=7, this run has steps=8")
    leave(run, status, {k: v for k, v in run.config.items() if k != "steps"})
    assert sweep.state(run).kind == "foreign"
    leave(run, status, run.config | {"wandb": {"mode": "disabled"}, "checkpoint": {"every": 3}})
    assert sweep.state(run).kind != "foreign"


def test_files_without_a_config_are_foreign(tmp_path):
    run = plan(tmp_path)[0]
    run.workdir.mkdir()
    for name in (".lock", ".config.json.tmp"):  # what a kill at the very start leaves is no run of anyone's
        (run.workdir / name).write_text("")
    assert sweep.state(run).kind == "missing"
    RunDir(run.workdir, ConfigDict(run.config))
    (run.workdir / "metrics.jsonl").write_text("")
    assert sweep.state(run) == ("foreign", "it holds files and no config.json")


# Sweeps


class Launcher:
    """Ends each job with the status that `ends` gives for it, and leaves what such a run leaves."""

    def __init__(self, **ends):
        self.ends = ends
        self.ran = []

    def __call__(self, jobs, cwd):
        assert cwd == ROOT
        statuses = []
        for job in jobs:
            self.ran.append(job.name)
            result, status = self.ends.get(job.name.replace("-", "_"), ("done", 0))
            leave(job, result)
            statuses.append(status)
        return statuses


def run(tmp_path, launcher, seeds=(0, 1), **kwargs):
    return sweep.run_sweep(PAIR, "tiny", seeds, tmp_path, launcher, **kwargs)


def test_a_sweep_does_what_is_missing_and_no_more(tmp_path, capsys):
    first = Launcher()
    assert run(tmp_path, first, seeds=(0,)) == 0
    assert first.ran == ["prenorm-0", "gr-0"]
    assert "Held-out loss" in capsys.readouterr().out
    leave(plan(tmp_path)[2])  # prenorm-1 was cut short
    second = Launcher()
    assert run(tmp_path, second) == 0
    assert second.ran == ["prenorm-1", "gr-1"]
    out = capsys.readouterr().out
    assert "4 runs, 2 to do" in out
    assert [line.split()[:2] for line in out.splitlines()[1:5]] == [
        ["prenorm-0", "done"], ["gr-0", "done"], ["prenorm-1", "unfinished"], ["gr-1", "missing"],
    ]  # fmt: skip
    third = Launcher()
    assert run(tmp_path, third) == 0 and third.ran == []


def test_a_run_that_fails_stops_no_other_and_is_reported(tmp_path, capsys):
    launcher = Launcher(prenorm_0=(None, 7), gr_1=("diverged", 1))
    assert run(tmp_path, launcher) == 1
    assert launcher.ran == ["prenorm-0", "gr-0", "prenorm-1", "gr-1"]
    out = capsys.readouterr().out
    assert "prenorm-0: unfinished, exit status 7" in out and "gr-1: diverged not finite at step 8, exit status 1" in out
    again = Launcher()
    assert run(tmp_path, again) == 1  # the diverged run is reported, and not tried again
    assert again.ran == ["prenorm-0"]
    assert "gr-1: diverged not finite at step 8" in capsys.readouterr().out


def test_runs_that_leave_nothing_are_reported(tmp_path, capsys):
    assert run(tmp_path / "new", lambda jobs, cwd: [2 for _ in jobs], seeds=(0,)) == 1
    assert "gr-0: missing, exit status 2" in capsys.readouterr().out


def test_a_run_that_ends_well_and_leaves_no_result_has_failed(tmp_path, capsys):
    assert run(tmp_path, Launcher(gr_0=(None, 0)), seeds=(0,)) == 1
    assert "gr-0: unfinished" in capsys.readouterr().out.split("not done")[1]


def test_runs_that_are_handed_over_are_not_judged(tmp_path, capsys):
    assert run(tmp_path, Launcher(prenorm_0=(None, None), gr_0=(None, None)), seeds=(0,)) == 0
    assert "2 runs are not waited for" in capsys.readouterr().out


def test_a_foreign_directory_is_refused_before_anything_runs(tmp_path):
    runs = plan(tmp_path)
    leave(runs[3], "done", runs[3].config | {"steps": 7})
    launcher = Launcher()
    with pytest.raises(UsageError, match="gr-1.*steps=7, this run has steps=8"):
        run(tmp_path, launcher)
    assert launcher.ran == []


def test_a_dry_run_prints_the_commands_and_runs_nothing(tmp_path, capsys):
    leave(plan(tmp_path)[0], "done")
    launcher = Launcher()
    assert run(tmp_path, launcher, dry_run=True) == 0
    assert launcher.ran == [] and not (tmp_path / "gr-0").exists()
    lines = capsys.readouterr().out.splitlines()
    assert lines[5] == f"cd {ROOT}"
    assert [shlex.split(line) for line in lines[6:]] == [r.command for r in plan(tmp_path)[1:]]


# The local launcher


class Job:
    def __init__(self, name, code):
        self.name, self.command, self.workdir = name, [sys.executable, "-c", code], Path(name)


def test_jobs_run_in_order_from_the_directory_and_return_their_statuses(tmp_path):
    def job(name, status):
        return Job(name, f"open('log', 'a').write('{name} '); raise SystemExit({status})")

    assert local.launch([job("a", 0), job("b", 3), job("c", 0)], tmp_path) == [0, 3, 0]
    assert (tmp_path / "log").read_text() == "a b c "


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_job_save_and_starts_no_other(tmp_path, sent, capsys):
    save = (
        "import os, signal, time\n"
        "def save(*_):\n    open('saved', 'w').close(); raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        f"os.kill(os.getppid(), {int(sent)})\ntime.sleep(60)"
    )
    before = signal.getsignal(sent)
    with pytest.raises(RunFailed, match=f"stopped by {sent.name}"):
        local.launch([Job("a", save), Job("b", "open('other', 'w')")], tmp_path)
    assert (tmp_path / "saved").exists() and not (tmp_path / "other").exists()
    assert capsys.readouterr().out == "[1/2] a\n"
    assert signal.getsignal(sent) is before


def test_what_nohup_ignores_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hang_up = "import os, signal; os.kill(os.getppid(), signal.SIGHUP)"
        assert local.launch([Job("a", hang_up), Job("b", "open('other', 'w')")], tmp_path) == [0, 0]
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "other").exists()


def test_a_job_that_does_not_end_is_killed_with_its_children(tmp_path):
    deaf = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open('pid', 'w').write(str(child.pid))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)"
    )
    began = time.monotonic()
    with pytest.raises(RunFailed):
        local.launch([Job("a", deaf)], tmp_path, grace=0.2)
    assert time.monotonic() - began < 30  # it was not waited for
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/status")
    deadline = time.monotonic() + 5
    while status.exists() and "Z (zombie)" not in status.read_text():  # a zombie is dead and not yet reaped
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_launchers_by_name():
    assert launchers.get("local") is local.launch
    with pytest.raises(UsageError, match="did you mean 'local'"):
        launchers.get("locl")
    given = launchers.get("slurm", ["slurm.partition=gpu", "slurm.comment=a=b"])
    assert (given.func, given.keywords) == (slurm.launch, {"options": {"partition": "gpu", "comment": "a=b"}})
