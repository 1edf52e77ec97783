import csv
import io
import json

import pytest

from grlab import report
from grlab.errors import UsageError
from grlab.experiment import Experiment, Row, rate_grid
from grlab.report import records, table

EXPERIMENT = Experiment(
    name="pair",
    title="Two rows and one more",
    baseline="prenorm",
    rows=(
        Row("prenorm", "configs/prenorm.py", "Pre-norm", published={"loss": 1.617, "average": 50.91}),
        Row("mhc", "configs/mhc.py", "mHC", published={"loss": 1.594, "average": 54.47}),
        Row("gr", "configs/gr.py", "GR", published={"loss": 1.590, "average": 54.66}),
    ),
    source="a paper, Table 5",
    notes=("A note of the experiment.",),
)


@pytest.fixture
def runs(make_run, tmp_path):
    """Three seeds of three rows: mHC 0.02 ± noise lower, GR higher or lower by seed."""
    for seed, noise in enumerate((0.0, 0.3, -0.2)):
        make_run("prenorm", seed, 1.6 + noise, speed=1000)
        scores = {"cloze": 0.5, "copy": 0.7 + 0.01 * seed}
        make_run("mhc", seed, 1.58 + noise + 0.001 * seed, speed=800, benchmarks=scores)
        make_run("gr", seed, 1.6 + noise + (0.02, -0.03, 0.01)[seed], speed=900 + 10 * seed)
    return tmp_path / "runs"


def build(source, experiment=EXPERIMENT):
    return table.build(experiment, records.read(experiment, source))


def line(text, label, block=0):
    """The line of a row in the block of that number."""
    return [x for x in text.splitlines() if x.startswith(label + " ")][block]


def test_a_row_says_its_loss_difference_verdict_and_what_was_published(runs):
    text = build(runs).terminal()
    mhc = line(text, "mHC")
    # Losses 1.58, 1.881, 1.382; differences -0.020, -0.019, -0.018: sd 0.001, half width 0.001 * 4.302653 / sqrt(3).
    for cell in ("1.6143 ± 0.2513", "-0.0190 [-0.0215, -0.0165]", " lower ", "2.3290", " 0-2 ", "1.594", "-0.023"):
        assert cell in mhc, cell
    assert "not resolved" in line(text, "GR")
    assert "baseline" in line(text, "Pre-norm")
    # Averages 60, 60.5, 61 against 50: +10.50, sd 0.5, half width 0.5 * 4.302653 / sqrt(3).
    for cell in ("60.50 ± 0.50", "+10.50 [+9.26, +11.74]", "higher", "54.47", "+3.56", "50.0", "71.0"):
        assert cell in line(text, "mHC", 1), cell
    assert line(text, "GR", 2).split() == ["GR", "1,000", "2.00", "0.91"]
    assert "nats per byte" in text and "A note of the experiment." in text
    assert "cloze: 300 items, chance 25.0; copy: 300 items" in " ".join(text.split())
    assert "NOT" not in text.replace("not", "")


def test_the_loss_of_tokens_from_a_file_is_said_to_be_per_token(make_run, tmp_path):
    for row in ("prenorm", "gr"):
        make_run(row, 0, 2.5, config={"data": {"name": "stdlib", "tokenizer": "bpe.json"}})
    result = build(tmp_path / "runs")
    assert "Held-out loss, nats per token" in result.terminal() and "per byte" not in result.terminal()
    rates = rate_grid(EXPERIMENT, ("5e-3", "1e-2"), 100)
    make_run("prenorm@5e-3", 0, 2.5, config={"data": {"name": "stdlib", "tokenizer": "bpe.json"}})
    assert "nats per token" in build(tmp_path / "runs", rates).terminal()


def test_no_line_is_wider_than_the_terminal(make_run, tmp_path):
    names = {f"cloze_of_kind_{i}": 0.5 for i in range(9)}
    for row in ("prenorm", "mhc", "gr"):
        for seed in range(3):
            make_run(row, seed, 1.6 + 0.01 * seed, benchmarks=names)
    text = build(tmp_path / "runs").terminal(120)
    assert max(map(len, text.splitlines())) <= 120
    assert all(name in text for name in names)


def test_one_seed_is_said_to_resolve_nothing(make_run, tmp_path):
    make_run("prenorm", 0, 1.6)
    make_run("gr", 0, 1.5)
    text = build(tmp_path / "runs").terminal()
    assert "one seed" in line(text, "GR") and "-0.1000" in line(text, "GR") and "[-" not in line(text, "GR")
    assert "nothing is resolved" in text
    assert "±" not in line(text, "GR")


def test_a_row_that_diverged_has_no_verdict(make_run, tmp_path):
    for seed in range(3):
        make_run("prenorm", seed, 1.6 + 0.01 * seed)
    make_run("gr", 0, 1.4)
    make_run("gr", 1, 1.4, status="diverged", steps=40)
    make_run("gr", 2, 1.42)
    gr = build(tmp_path / "runs").results[2]
    text = build(tmp_path / "runs").terminal()
    assert gr.trouble == "DIVERGED at step 40 (seed 1)"
    assert gr.trouble in line(text, "GR") and "lower" not in line(text, "GR")
    assert "NOT COMPLETE: GR: diverged at step 40 (seed 1)" in text
    assert "missing" in line(text, "mHC")


def test_unfinished_and_missing_seeds_are_named(make_run, tmp_path):
    for seed in range(3):
        make_run("prenorm", seed, 1.6)
    make_run("gr", 0, 1.5)
    make_run("gr", 1, 1.5, status="unfinished", steps=30)
    make_run("mhc", 0, 1.5, status="unfinished", steps=20)
    text = build(tmp_path / "runs").terminal()
    notes = " ".join(text.split())
    assert "NOT COMPLETE: GR: unfinished at step 30 (seed 1), missing (seed 2)" in notes
    assert "unfinished at step 20 (seed 0)" in line(text, "mHC")
    assert " 0 " in line(text, "GR")


def test_a_baseline_without_runs_leaves_no_difference(make_run, tmp_path):
    make_run("gr", 0, 1.5)
    text = build(tmp_path / "runs").terminal()
    assert "missing" in line(text, "Pre-norm") and "no shared seed" in line(text, "GR")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("git_commit is fedcba", {"provenance": {"git_commit": "fedcba"}}),
        ("git_diff is 77", {"provenance": {"git_diff": "77"}}),
        ("versions.jax is 0.9", {"provenance": {"versions": {"jax": "0.9", "flax": "0.12.8"}}}),
        ("data_fingerprint is f2", {"provenance": {"data_fingerprint": "f2"}}),
        ("device_kind is TPU", {"provenance": {"device_kind": "TPU"}}),
        ("scale is demo", {"config": {"scale": "demo"}}),
        ("steps is 50", {"config": {"steps": 50}}),
        ("batch_size is 4", {"config": {"batch_size": 4}}),
    ],
)
def test_runs_that_are_not_alike_are_flagged(make_run, tmp_path, field, change):
    for seed in range(2):
        make_run("prenorm", seed, 1.6)
        make_run("mhc", seed, 1.6)
        make_run("gr", seed, 1.5, **(change if seed == 1 else {}))
    text = build(tmp_path / "runs").terminal()
    assert text.count("\nGR [a] ") == 3 and "mHC [" not in text  # in every block
    assert f"[a] NOT ALIKE: GR: seed 1: {field}; prenorm-0 has " in " ".join(text.split())


def test_declared_differences_are_not_flagged_but_between_the_seeds_of_a_row(make_run, tmp_path):
    for seed in range(2):
        make_run("prenorm", seed, 1.6)
        make_run("gr", seed, 1.5, lr=1e-2)
        make_run("mhc", seed, 1.5, lr=1e-2 * (1 + seed))
    text = " ".join(build(tmp_path / "runs").terminal().split())
    assert "[a] NOT ALIKE: mHC: seed 1: optim.lr is 0.02; mhc-0 has 0.01" in text
    assert "GR [" not in text


@pytest.mark.parametrize("provenance", [{"git_diff": "77"}, {"git_commit": ""}])
def test_uncommitted_changes_are_named(make_run, tmp_path, provenance):
    make_run("prenorm", 0, 1.6, provenance=provenance)
    make_run("gr", 0, 1.6)
    assert "uncommitted changes to the code: prenorm-0." in build(tmp_path / "runs").terminal()


def test_a_run_resumed_with_other_code_is_flagged(make_run, tmp_path):
    make_run("prenorm", 0, 1.6, provenance={"resumed": [{"step": 3, "command": "train again"}, {"step": 7}]})
    make_run("gr", 0, 1.6, provenance={"resumed": [{"step": 40, "git_commit": "fedcba", "command": "train again"}]})
    text = " ".join(build(tmp_path / "runs").terminal().split())
    assert "[a] NOT ALIKE: GR: resumed at step 40 with another git_commit" in text and "Pre-norm [" not in text


def test_csv_and_markdown_hold_every_row(runs):
    result = build(runs)
    rows = {r["row"]: r for r in csv.DictReader(io.StringIO(result.csv()))}
    assert list(rows) == ["prenorm", "mhc", "gr"]
    assert float(rows["mhc"]["loss_delta"]) == pytest.approx(-0.019)
    assert (rows["mhc"]["verdict"], rows["mhc"]["seeds"], rows["mhc"]["published_loss"]) == ("lower", "0 1 2", "1.594")
    assert (float(rows["mhc"]["copy"]), float(rows["gr"]["speed"])) == pytest.approx((0.71, 0.91))
    assert result.markdown().count("| GR | ") == 3


def test_parameters_that_a_token_does_not_use_have_a_column(runs):
    """Where a row has experts: what a token makes use of beside what there is; a run that does not say has none."""
    assert "for a token" not in build(runs).markdown()
    for seed in range(3):
        file = runs / f"mhc-{seed}" / "final_result.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"params": 3000, "active_params": 1200}))
    text = build(runs).markdown()
    assert "| row | parameters | for a token | MFLOP/token |" in text
    assert "| mHC | 3,000 | 1,200 | 2.00 |" in text and "| GR | 1,000 | - | 2.00 |" in text


def test_the_table_is_the_same_from_records_json(runs, tmp_path, capsys):
    report.write(EXPERIMENT, runs, tmp_path / "a")
    report.write(EXPERIMENT, tmp_path / "a" / "records.json", tmp_path / "b")
    first, second = capsys.readouterr().out.split("wrote ")[:2]
    assert first.strip() == second.split("\n", 1)[1].strip()
    for name in ("table.md", "table.csv", "records.json", "figure.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert report.text(EXPERIMENT, runs) == first.rstrip("\n")


def test_a_source_without_runs_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no run of pair in it"):
        report.write(EXPERIMENT, tmp_path)
    with pytest.raises(UsageError, match="no such directory"):
        report.write(EXPERIMENT, tmp_path / "nowhere")
