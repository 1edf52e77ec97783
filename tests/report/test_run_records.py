import json

import numpy as np
import pytest

from grlab.errors import UsageError
from grlab.experiment import Experiment, Row
from grlab.report import records, table

ROWS = (Row("gr", "configs/gr.py", "GR"), Row("gr@1e-2", "configs/gr.py", "GR"))
EXPERIMENT = Experiment("two", "Two rows", "gr", ROWS)


def test_runs_are_read_by_row_and_seed(make_run, tmp_path):
    for row, seed in (("gr@1e-2", 1000), ("gr", 10), ("gr", 2), ("hc", 0)):
        make_run(row, seed, 1.5)
    (tmp_path / "runs" / "notes").mkdir()
    found = records.read(EXPERIMENT, tmp_path / "runs")
    assert [(r.row, r.seed) for r in found] == [("gr", 2), ("gr", 10), ("gr@1e-2", 1000)]
    assert [r.status for r in found] == ["done"] * 3


def test_curves(make_run, tmp_path):
    make_run("gr", 0, 1.5, steps=1000)
    (run,) = records.read(EXPERIMENT, tmp_path / "runs")
    assert run.heldout == [[1000, 1.5]]
    assert len(run.train) == records.CURVE_POINTS and run.train[-1][0] == 1000
    # The first stretch is of steps 1 to 10, the mean of 1.5 + 1/s over them.
    assert run.train[0] == [10, pytest.approx(1.5 + sum(1 / s for s in range(1, 11)) / 10, rel=1e-5)]


def test_a_last_line_cut_short_is_left_out_and_a_damaged_one_is_refused(make_run, tmp_path):
    metrics = make_run("gr", 0, 1.5, status="unfinished", steps=30) / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 31, "lo')
    (run,) = records.read(EXPERIMENT, tmp_path / "runs")
    assert (run.status, run.step) == ("unfinished", 30)
    metrics.write_text('{"step": 1, "lo\n' + metrics.read_text())
    with pytest.raises(UsageError, match="line 1 is not JSON"):
        records.read(EXPERIMENT, tmp_path / "runs")


def test_a_loss_that_is_not_finite_is_no_point_of_a_curve(make_run, tmp_path):
    path = make_run("gr", 0, 1.5, status="diverged", steps=3)
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": float("nan")}, {"step": 3, "loss": None}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (run,) = records.read(EXPERIMENT, tmp_path / "runs")
    assert (run.status, run.step, run.train) == ("diverged", 3, [[1, 2.0]])


def test_a_directory_of_another_seed_is_refused(make_run, tmp_path):
    make_run("gr", 0, 1.5, config={"seed": 4})
    with pytest.raises(UsageError, match="its config has seed=4"):
        records.read(EXPERIMENT, tmp_path / "runs")


def test_records_survive_json(make_run, tmp_path):
    make_run("gr", 0, 1.5)
    make_run("gr", 1, 1.5, status="unfinished")
    before = records.read(EXPERIMENT, tmp_path / "runs")
    (tmp_path / "records.json").write_text(records.to_json(EXPERIMENT, before))
    assert records.read(EXPERIMENT, tmp_path / "records.json") == before


def test_spikes_are_counted_by_the_report_s_rule_and_above_the_noise():
    """Above the median of the last 201 steps by more than 0.1, and than the noise; the first descent is none."""
    losses = np.linspace(3.0, 2.0, 1000)
    assert records.count_spikes(losses) == (0, 0)
    spiked = losses.copy()
    spiked[[10, 500, 501, 999]] += 0.5
    spiked[700] += 0.05
    assert records.count_spikes(spiked) == (4, 4)
    noise = np.random.default_rng(0).normal(0, 0.1, 1000)
    by_rule, above_noise = records.count_spikes(1.3 + noise)
    assert 0.13 < by_rule / 1000 < 0.19 and above_noise == 0  # a standard deviation up: 16 %
    noisy = 1.3 + 4 * np.exp(-np.arange(1000) / 100) + noise
    assert records.count_spikes(noisy)[1] == 0
    noisy[[10, 500, 501, 999]] += 3.0
    assert records.count_spikes(noisy)[1] in (3, 4)  # step 10 stands on the steep part
    assert records.count_spikes(np.array([])) == (0, 0)


def test_the_table_counts_spikes_and_clipped_gradients(make_run):
    path = make_run("prenorm", 0, 1.5, steps=400)
    metrics = [{"step": s, "loss": 2.0 + (s in (200, 300)), "grad_norm": 1.0 + (s == 7)} for s in range(1, 400)]
    metrics.append({"step": 400, "loss": 2.0, "grad_norm": None})  # as of a run that diverges
    (path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    config = json.loads((path / "config.json").read_text())
    config["optim"]["clip"] = 1.5
    (path / "config.json").write_text(json.dumps(config))
    experiment = Experiment(
        "stable", "Stable", "prenorm", (Row("prenorm", "configs/prenorm.py", "Pre-norm"),), stability=True
    )
    (record,) = records.read(experiment, path.parent)
    assert (record.report_spikes, record.spikes, record.clipped) == (2, 2, 2)
    text = table.build(experiment, [record]).markdown()
    assert "| Pre-norm | 50.0 | 50.0 | 50.0 | 0 of 1 | 400 |" in text
