"""Figures of few rows and of many: each row has a line of its own."""

import matplotlib.image
import pytest

from grlab import report
from grlab.experiment import Experiment, Row
from grlab.report import figure, records, table


@pytest.mark.parametrize("count", [3, 24])
def test_every_row_has_a_line_of_its_own(count, make_run, tmp_path):
    rows = (Row("base", "configs/gr.py", "Base"), *(Row(f"r{i}", "configs/gr.py", f"Row {i}") for i in range(count)))
    experiment = Experiment("many", "Many", "base", rows)
    for i, row in enumerate(rows[:-1]):  # the last has no run
        for seed in (0, 1):
            make_run(row.name, seed, 1.6 + 0.01 * i, status="diverged" if i == 3 else "done")
    runs = records.read(experiment, tmp_path / "runs")
    lines = figure._lines(table.build(experiment, runs))
    assert len(set(lines.values())) == len(lines) == count + 1
    report.write(experiment, tmp_path / "runs", tmp_path / "out")
    height, width, _ = matplotlib.image.imread(tmp_path / "out" / "figure.png").shape
    assert width == 1600 and height == (800 if count == 3 else 640 + 80 * len(rows))
