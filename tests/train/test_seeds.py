"""Several seeds trained in one program: each leaves what a run of its own leaves, within 1e-5.

Seen to fail: every seed given the first one's batches; the first one's initial values; a checkpoint of the first one's
part of the state; the others ended with the one that diverged.
"""

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from grlab.config import ROOT
from grlab.errors import RunFailed, UsageError
from grlab.train import loop

SEEDS = (0, 3)


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """alone(config) -> the directory of each seed's own run, trained once."""
    made = {}

    def of(config):
        key = json.dumps(config.to_dict(), sort_keys=True)
        if key not in made:
            made[key] = root = tmp_path_factory.mktemp("alone")
            for seed in SEEDS:
                config.seed = seed
                loop.train(config, root / f"run-{seed}")
        return made[key]

    return of


def compare(found, wanted, records, but=()):
    """Records, configs and results of two run directories."""
    assert [r.keys() for r in records(found)] == [r.keys() for r in records(wanted)]
    for mine, theirs in zip(records(found), records(wanted), strict=True):
        assert mine["step"] == theirs["step"] and mine.get("eval") == theirs.get("eval")
        np.testing.assert_allclose(mine["loss"], theirs["loss"], rtol=1e-5, err_msg=str(mine))
    assert (found / "config.json").read_text() == (wanted / "config.json").read_text()
    mine, theirs = (json.loads((d / "final_result.json").read_text()) for d in (found, wanted))
    assert mine.keys() == theirs.keys() and mine["status"] == theirs["status"] == "done"
    for name in ("step", "tokens", "params", "flops_per_token"):
        assert mine[name] == theirs[name]
    np.testing.assert_allclose(mine["val_loss"], theirs["val_loss"], rtol=1e-5)


@pytest.mark.parametrize(
    "row, more", [("gr", ()), ("mhc", ("optim.accumulate=2",)), ("prenorm", ("model.remat=streams",))], ids=str
)
def test_each_seed_is_the_run_of_its_own(row, more, tiny, alone, records, tmp_path):
    wanted = alone(tiny(row, *more))
    results = loop.train_together(tiny(row, *more, "seeds=0,3"), tmp_path / "run")
    assert [r["status"] for r in results] == ["done", "done"]
    assert results[0]["val_loss"] != results[1]["val_loss"]
    for seed in SEEDS:
        compare(tmp_path / f"run-{seed}", wanted / f"run-{seed}", records)
        steps = [sorted(p.name for p in (d / f"run-{seed}" / "checkpoints").iterdir()) for d in (tmp_path, wanted)]
        assert steps[0] == steps[1]


def test_on_a_mesh_each_group_of_devices_has_its_seeds(tiny, alone, records, tmp_path):
    """Two seeds of two devices each, in a process of its own: an axis of seeds, and one of the batch."""
    wanted = alone(tiny("gr", "eval.batch_size=8"))
    config = tiny("gr", "eval.batch_size=8", "seeds=0,3", "mesh.seeds=2", "mesh.fsdp=2", "mesh.data=1")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    env = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"}
    command = [sys.executable, "launch.py", "train", f"--config={file}", f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for seed in SEEDS:
        mine, theirs = (records(d / f"run-{seed}") for d in (tmp_path, wanted))
        np.testing.assert_allclose([r["loss"] for r in mine], [r["loss"] for r in theirs], rtol=1e-5)


class Cut(Exception):
    pass


def cut_at(monkeypatch, at: int) -> None:
    """A process that dies at step `at`, its checkpoints written."""
    record = loop.Run.record

    def until(self, step, metrics):
        if step == at:
            raise Cut
        record(self, step, metrics)

    monkeypatch.setattr(loop.Run, "record", until)


def test_seeds_go_on_together_or_alone(tiny, alone, records, tmp_path, capsys):
    """Killed in step 7 of 8, with checkpoints at 2, 4 and 6: seed 0 loses that of 6, so both go on at 4; then one of
    two that were killed goes on alone, and together the other is brought to its end beside what is done already."""
    more = ("checkpoint.every=2", "checkpoint.keep=4")
    wanted, together = alone(tiny("gr", *more)), tiny("gr", *more, "seeds=0,3")
    for case in ("together", "alone"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Cut):
            cut_at(patch, 7)
            loop.train_together(together, tmp_path / case)
        if case == "together":
            shutil.rmtree(tmp_path / "together-0" / "checkpoints" / "6")
        else:
            of_one = tiny("gr", *more)
            of_one.seed = 3
            loop.train(of_one, tmp_path / "alone-3")
        loop.train_together(together, tmp_path / case)
        for seed in SEEDS:
            compare(tmp_path / f"{case}-{seed}", wanted / f"run-{seed}", records)
            resumed = json.loads((tmp_path / f"{case}-{seed}" / "provenance.json").read_text())["resumed"]
            assert [r["step"] for r in resumed] == [4 if case == "together" else 6]
    assert "alone-3: done already" in capsys.readouterr().out
    assert len(loop.train_together(together, tmp_path / "alone")) == 2  # nothing is left to do


def test_a_seed_far_behind_is_not_waited_for(tiny, tmp_path, monkeypatch):
    """Seed 0 was killed at step 7 of its own run; what it has done is not thrown away for a seed that begins."""
    of_one = tiny("gr")
    with monkeypatch.context() as patch, pytest.raises(Cut):
        cut_at(patch, 7)
        loop.train(of_one, tmp_path / "run-0")
    with pytest.raises(UsageError, match=r"config.seeds='0,3': no checkpoint is of the same step .* step 0: 4, 3: 0\)"):
        loop.train_together(tiny("gr", "seeds=0,3"), tmp_path / "run")
    assert (tmp_path / "run-0" / "checkpoints" / "4").is_dir()


def test_a_seed_that_diverges_ends_alone(tiny, alone, records, tmp_path, monkeypatch):
    record = loop.Run.record

    def poisoned(self, step, metrics):
        if step == 3:
            metrics = metrics | {"grad_norm": np.array([1.0, np.nan])}
        record(self, step, metrics)

    wanted = alone(tiny("gr"))
    with monkeypatch.context() as patch, pytest.raises(RunFailed, match=r"run-3: diverged: .* not finite at step 3"):
        patch.setattr(loop.Run, "record", poisoned)
        loop.train_together(tiny("gr", "seeds=0,3"), tmp_path / "run")
    result = json.loads((tmp_path / "run-3" / "final_result.json").read_text())
    assert (result["status"], result["step"]) == ("diverged", 3)
    assert [r["step"] for r in records(tmp_path / "run-3")] == [1, 2, 3]
    compare(tmp_path / "run-0", wanted / "run-0", records)
    with pytest.raises(RunFailed, match="run-3: diverged earlier"):
        loop.train_together(tiny("gr", "seeds=0,3"), tmp_path / "run")


def test_nothing_is_sent_to_the_device_unasked(tiny, tmp_path, monkeypatch):
    """A batch that is still the host's is an error at the step, not a transfer in it."""
    monkeypatch.setattr(loop.Run, "put", lambda self, batches: jax.tree.map(lambda x: np.array(x), batches[0]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        loop.train(tiny("gr"), tmp_path / "run")


@pytest.mark.parametrize(
    "overrides, line",
    [
        (("seeds=0,0",), "config.seeds='0,0': give a count (3) or a list of different seeds"),
        (("seeds=0,x",), "config.seeds='0,x': give a count (3) or a list of different seeds"),
        (("seeds=2", "seed=1"), "config.seed='1': config.seeds=2 is given, too: leave one out"),
        (("mesh.seeds=2",), "config.mesh.seeds=2: is of several seeds: give --config.seeds, too"),
    ],
)
def test_a_mistake_is_one_line(overrides, line, tiny):
    from grlab import config as configs

    with pytest.raises(UsageError) as e:
        configs.load("configs/gr.py:tiny", overrides)
    assert line in str(e.value) and "\n" not in str(e.value)
