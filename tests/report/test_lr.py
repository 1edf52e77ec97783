from grlab import report
from grlab.experiment import Experiment, Row
from grlab.report import lr, records

RATES = ("5e-3", "1e-2", "2e-2")
EXPERIMENT = Experiment(
    name="rates",
    title="Rates",
    baseline="prenorm@1e-2",
    rows=tuple(
        Row(f"{name}@{rate}", f"configs/{name}.py", f"{label} @ {rate}", {"optim.lr": float(rate)})
        for name, label in (("prenorm", "Pre-norm"), ("gr", "GR"))
        for rate in RATES
    ),
)


def make(make_run, name, losses, **kwargs):
    for rate, loss in zip(RATES, losses, strict=True):
        make_run(f"{name}@{rate}", 1000, loss, lr=float(rate), **kwargs)


def grid(tmp_path):
    return lr.grid(EXPERIMENT, records.read(EXPERIMENT, tmp_path / "runs"))


def test_best_inside_and_at_the_edge(make_run, tmp_path):
    make(make_run, "prenorm", (1.7, 1.6, 1.65))
    make(make_run, "gr", (1.7, 1.6, 1.55))
    g = grid(tmp_path)
    assert g.best == {"Pre-norm": "1e-2", "GR": "2e-2"}
    assert g.block.rows == [
        ["Pre-norm", "1.7000", "*1.6000", "1.6500", "1e-2"],
        ["GR", "1.7000", "1.6000", "*1.5500", "2e-2"],
    ]
    edges = [note for note in g.notes if note.startswith("EDGE")]
    assert len(edges) == 1 and "GR, 2e-2" in edges[0]
    assert "*1.5500" in report.text(EXPERIMENT, tmp_path / "runs")


def test_diverged_and_missing_cells(make_run, tmp_path):
    make(make_run, "prenorm", (1.7, 1.6, 1.65))
    make_run("gr@1e-2", 1000, 1.5, lr=1e-2)
    make_run("gr@2e-2", 1000, 0.0, lr=2e-2, status="diverged")
    g = grid(tmp_path)
    assert g.block.rows[1] == ["GR", "missing", "*1.5000", "DIVERGED", "1e-2"]
    assert "NOT COMPLETE: GR has no result at 5e-3." in g.notes


def test_figure_of_a_grid(make_run, tmp_path):
    make(make_run, "prenorm", (1.7, 1.6, 1.65))
    report.write(EXPERIMENT, tmp_path / "runs", tmp_path / "out")
    assert (tmp_path / "out" / "figure.png").stat().st_size > 10_000


def test_other_experiments_are_no_grid(make_run, tmp_path):
    plain = Experiment("plain", "Plain", "gr", (Row("gr", "configs/gr.py", "GR"),))
    assert lr.grid(plain, []) is None
