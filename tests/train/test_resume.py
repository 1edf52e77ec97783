"""A run that was killed or stopped and run again is the run that was not: the same bits.

Seen to fail: the optimizer's state not restored, batches drawn from the start again.
"""

import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from grlab import config as configs
from grlab import parallel
from grlab.config import ROOT
from grlab.errors import UsageError
from grlab.train import loop, signals
from grlab.train.checkpoint import Checkpoints
from grlab.train.rundir import RunDir
from grlab.train.step import make_trainer
from tests import rows


def final_state(config, workdir):
    """The state of the last checkpoint, as NumPy arrays."""
    trainer = make_trainer(config, 256, parallel.make_mesh(config.mesh))
    checkpoints = Checkpoints(workdir / "checkpoints", keep=2)
    state, data = checkpoints.restore(config.steps, trainer.abstract)
    checkpoints.close()
    assert data["step"] == config.steps
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def kill_after(step, saved, config, tmp_path, workdir):
    """Runs `config` in a process that gets SIGKILL after update `step`, with checkpoint `saved` whole (0: any)."""
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "tests.train.killed", str(step), str(saved), str(tmp_path / "config.json")]
    done = subprocess.run([*command, str(workdir)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert not (workdir / "final_result.json").exists()


# What else a checkpoint or a resumed step may hold: Muon's momenta, streams whose rounding is drawn, parts of a batch.
FLOAT8 = ("residual.stream_dtype=float8_e4m3fn", "optim.name=muon", "optim.accumulate=2", "model.remat=full")
HYBRID = (*rows.HYBRID, "optim.name=muon", "optim.accumulate=2", "model.remat=full")
CASES = [(row, ()) for row in rows.OF_EACH_KIND] + [("gr", FLOAT8), ("gr", HYBRID)]


@pytest.mark.parametrize("row, more", CASES, ids=str)
def test_killed_run_ends_as_one_that_was_not(row, more, tiny, records, tmp_path):
    """SIGKILL after update 6 of 8, the checkpoint of step 4 behind it: parameters, optimizer and records are equal."""
    config = tiny(row, *more)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    loop.train(config, whole)
    kill_after(6, 4, config, tmp_path, parts)
    loop.train(config, parts)

    assert json.loads((parts / "provenance.json").read_text())["resumed"][0]["step"] == 4
    for a, b in zip(final_state(config, whole), final_state(config, parts), strict=True):
        np.testing.assert_array_equal(a, b)
    assert records(whole) == records(parts)
    assert [r["step"] for r in records(parts) if "eval" not in r] == list(range(1, 9))


def test_killed_while_it_saves(tiny, records, tmp_path):
    """SIGKILL right after the update that follows a save, which may be whole or cut short by then: the same records."""
    config = tiny("prenorm")
    loop.train(config, tmp_path / "whole")
    kill_after(5, 0, config, tmp_path, tmp_path / "parts")
    loop.train(config, tmp_path / "parts")
    assert records(tmp_path / "whole") == records(tmp_path / "parts")


def test_sigterm_saves_and_the_same_command_goes_on(overrides, records, tiny, tmp_path):
    """A real SIGTERM to `launch.py train`: the state is saved at the step where it came, status 143, and it goes on."""
    more = [*overrides, "steps=100000", "checkpoint.every=100000", "eval.every=100000"]
    command = [sys.executable, "launch.py", "train", "--config=configs/gr.py:tiny", f"--workdir={tmp_path / 'run'}"]
    command += [f"--config.{o}" for o in more]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "parameters, residual" in line:  # compiling, or past it
            break
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "stopped by SIGTERM during" in err and "run the same command to go on" in err
    saved = sorted(int(p) for p in os.listdir(tmp_path / "run" / "checkpoints"))
    steps = [r["step"] for r in records(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1)) and saved == ([len(steps)] if steps else [])


@pytest.mark.parametrize("kind, time, step", [
    ("compile", 1, 0), ("train", 5, 6), ("eval", 1, 4), ("eval", 2, 8), ("eval", 3, 8),
], ids=["compilation", "an update", "an evaluation", "the last evaluation", "the benchmarks"])  # fmt: skip
def test_stopped_anywhere_and_run_again_is_the_whole_run(kind, time, step, tiny, records, tmp_path, monkeypatch):
    """SIGTERM in each part of a run: it saves, raises Stopped and says where; the second call ends as one whole run."""
    config = tiny("prenorm", "eval.cloze_items=4", "eval.cloze_context=64")
    loop.train(config, tmp_path / "whole")
    clock, record, done = loop.Clock.time, loop.Run.record, []

    def stop_in_time(of):
        done.append(of)
        if (of, done.count(of)) == (kind, time):
            os.kill(os.getpid(), signal.SIGTERM)

    def timed(self, of, call, *args):
        return clock(self, of, lambda *a: (stop_in_time(of), call(*a))[1], *args)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Clock, "time", timed)
        patch.setattr(loop.Run, "record", lambda *args: (stop_in_time("train"), record(*args))[1])
        said = f"during {kind} at step {step}, which is saved" if step else f"during {kind} before the first step"
        with pytest.raises(signals.Stopped, match=said):
            loop.train(config, tmp_path / "parts")
    assert not step or (tmp_path / "parts" / "checkpoints" / str(step)).exists()
    loop.train(config, tmp_path / "parts")
    assert records(tmp_path / "whole") == records(tmp_path / "parts")
    for a, b in zip(final_state(config, tmp_path / "whole"), final_state(config, tmp_path / "parts"), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_finished_run_is_left_alone(tiny, tmp_path, capsys):
    config = tiny("prenorm", "steps=4")
    first = loop.train(config, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert loop.train(config, tmp_path / "run") == first
    assert "done already" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_workdir_of_another_config_is_refused(tiny, tmp_path):
    loop.train(tiny("prenorm", "steps=4"), tmp_path / "run")
    with pytest.raises(UsageError, match="belongs to a run with seed=0, this one has 1"):
        loop.train(tiny("prenorm", "steps=4", "seed=1"), tmp_path / "run")
    with pytest.raises(UsageError, match="residual"):
        loop.train(tiny("hc", "steps=4", "row=prenorm"), tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds files but no config.json"):
        loop.train(tiny("prenorm", "steps=4"), tmp_path / "other")


def test_a_mistake_does_not_take_the_directory(tiny, tmp_path):
    """A config that cannot be, found after the directory was looked at, leaves it free for the mended command."""
    for mistake in ("model.kv_heads=3", "mesh.data=3", "data.path=/nowhere", "batch_size=0"):
        with pytest.raises(UsageError):
            loop.train(tiny("prenorm", "steps=2", "optim.warmup=1", mistake), tmp_path / "run")
    assert loop.train(tiny("prenorm", "steps=2", "optim.warmup=1"), tmp_path / "run")["status"] == "done"


def test_two_processes_do_not_share_a_directory(tiny, tmp_path):
    config = tiny("prenorm", "steps=2", "optim.warmup=1")
    first = RunDir(tmp_path / "run", config)
    first.claim()
    with pytest.raises(UsageError, match="another process is training in it"):
        loop.train(config, tmp_path / "run")
    first.release()
    assert loop.train(config, tmp_path / "run")["status"] == "done"


def test_the_saved_config_gives_the_run_again(tiny, records, tmp_path):
    config = tiny("gr", "steps=2", "optim.warmup=1")
    loop.train(config, tmp_path / "run")
    saved = tmp_path / "run" / "config.json"
    loop.train(configs.load(str(saved)), tmp_path / "again")
    assert records(tmp_path / "run") == records(tmp_path / "again")
    # A field that was unset, too, can be given another value; and what is no saved config is one line.
    plain = configs.load("configs/gr.py:tiny")
    saved.write_text(json.dumps(plain.to_dict()))
    assert configs.load(str(saved)).to_dict() == plain.to_dict()
    assert configs.load(str(saved), ["data.path=x"]).data.path == "x"
    for text, line in (
        ("[1]", "not a JSON object"),
        ('{"seed": 1', "not a JSON object"),
        ('{"seed": 1}', "lacks batch_size, "),
    ):
        saved.write_text(text)
        with pytest.raises(UsageError, match=line):
            configs.load(str(saved))


def test_an_unreadable_checkpoint_is_one_line_and_the_one_before_serves(tiny, records, tmp_path):
    config = tiny("prenorm")
    run = tmp_path / "run"
    loop.train(config, run)
    complete = records(run)
    (run / "final_result.json").unlink()
    for file in (run / "checkpoints" / "8").rglob("*"):
        if file.is_file():
            file.write_bytes(b"\x00not a checkpoint")
    with pytest.raises(UsageError, match="cannot be read") as e:
        loop.train(config, run)
    assert "\n" not in str(e.value) and "checkpoints/8" in str(e.value)
    subprocess.run(["rm", "-r", str(run / "checkpoints" / "8")], check=True)
    loop.train(config, run)
    assert records(run) == complete


def test_a_checkpoint_cut_short_is_not_chosen(tiny, tmp_path):
    """What a kill leaves of a save under way, a folder with Orbax's temporary name, is passed over."""
    config = tiny("prenorm", "steps=4")
    run = tmp_path / "run"
    loop.train(config, run)
    (run / "checkpoints" / "6.orbax-checkpoint-tmp").mkdir()
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    assert checkpoints.latest() == 4
    checkpoints.close()


def test_another_corpus_is_refused(tiny, text, tmp_path):
    """The corpus changes under a run that is half done: refused, whatever the config says."""
    config = tiny("prenorm")
    run = tmp_path / "run"
    loop.train(config, run)
    (run / "final_result.json").unlink()
    record = json.loads((run / "provenance.json").read_text())
    (run / "provenance.json").write_text(json.dumps(record | {"data_fingerprint": "0" * 64}))
    with pytest.raises(UsageError, match="was trained on corpus 000000000000"):
        loop.train(config, run)
