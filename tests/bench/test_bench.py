"""The timings' arithmetic, and the command from its arguments to its table and record; no test asserts a time."""

import json

import pytest

from grlab import experiment
from grlab.bench import peers, run, sites, steps, timing
from grlab.errors import UsageError

TINY = dict(parts="steps,sites", rows="gr", rounds=2, peers=False, overrides=["model.vocab=256"])


def test_every_call_runs_in_every_round_and_every_second_round_backwards(monkeypatch):
    """Ratios are of one round: a machine that gets slower is slower for all."""
    ran, clock = [], iter(range(10_000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = {name: lambda name=name: ran.append(name) or 0 for name in "ab"}
    times = timing.side_by_side(calls, rounds=3, seconds=0.0)
    assert "".join(ran[-6:]) == "abbaab"
    assert times.seconds == {"a": [1, 1, 1], "b": [1, 1, 1]}


def test_ratios_are_paired_by_round():
    times = timing.Times({"slow": [2.0, 20.0, 6.0], "base": [1.0, 10.0, 2.0]})
    assert times.median("slow") == 6.0
    assert times.ratio("slow", "base") == (2.0, 2.0, 2.5)


def test_it_prints_a_table_and_writes_what_it_measured(tmp_path, capsys):
    """A row beside the baseline, which is there without being asked for, and the four sites."""
    run(experiment.load("experiments/systems.py"), "tiny", out=str(tmp_path), **TINY)
    out = capsys.readouterr().out
    assert "A training step at scale tiny: times that of prenorm" in out and "× prenorm" in out
    record = json.loads((tmp_path / "bench-tiny.json").read_text())
    assert set(record["steps"]) == {"prenorm", "gr"} and set(record["sites"]) == set(sites.SYSTEMS)
    assert all(len(seconds) == 2 for part in ("steps", "sites") for seconds in record[part].values())
    assert record["git_commit"] and record["device_kind"] and record["overrides"] == ["model.vocab=256"]


def test_compiling_is_timed_by_depth(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(steps, "DEPTHS", (1, 2))
    fields = TINY | {"parts": "compile", "rows": "prenorm"}
    run(experiment.load("experiments/systems.py"), "tiny", out=str(tmp_path), **fields)
    assert "× prenorm, 1 layers" in capsys.readouterr().out
    record = json.loads((tmp_path / "bench-tiny.json").read_text())
    assert set(record["compile"]) == {"prenorm, 1 layers", "prenorm, 2 layers"}


def test_a_peer_that_is_not_installed_is_named(monkeypatch):
    def missing(*_):
        raise ModuleNotFoundError("No module named 'that'", name="that")

    monkeypatch.setattr(peers, "_PEERS", {"that one": missing})
    assert peers.calls(8, 4, 2) == ({}, {"that one": "that is not installed"})
    assert set(sites.OURS.values()) <= set(sites.SYSTEMS)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"parts": "step"}, "--parts='step': did you mean 'steps'?"),
        ({"rows": "grr"}, "row='grr': did you mean 'gr'?"),
        ({"rounds": 0}, "--rounds=0: must be above 0"),
        ({"overrides": ["optim.lrr=1"]}, "did you mean 'lr'?"),
    ],
)
def test_a_mistake_is_one_line(change, line):
    with pytest.raises(UsageError) as e:
        run(experiment.load("experiments/systems.py"), "tiny", out=None, **(TINY | change))
    assert line in str(e.value) and "\n" not in str(e.value)
