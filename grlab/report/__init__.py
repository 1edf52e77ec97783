"""Tables and figures of an experiment, from run directories or from the records.json of an earlier report."""

from pathlib import Path

from grlab.errors import UsageError, check_directory
from grlab.experiment import Experiment
from grlab.report import records, table


def text(experiment: Experiment, source: str | Path) -> str:
    """The terminal table of the runs at `source`, a directory of run directories or a records.json."""
    return table.build(experiment, records.read(experiment, source)).terminal()


def write(experiment: Experiment, source: str | Path, out_dir: str | Path | None = None) -> None:
    """Prints the table; with `out_dir` also writes table.md, table.csv, figure.png and records.json there.

    `source` is a directory of run directories, or a records.json, which gives the same files again.
    Raises UsageError when it holds no run of the experiment, and when `out_dir` cannot be made.
    """
    runs = records.read(experiment, source)
    if not runs:
        rows = ", ".join(f"{row.name}-0" for row in experiment.rows[:2])
        raise UsageError("runs", str(source), f"no run of {experiment.name} in it (its runs are named {rows}, ...)")
    result = table.build(experiment, runs)
    if out_dir is None:
        print(result.terminal())
        return
    check_directory("--out", out_dir)
    from grlab.report import figure  # matplotlib takes a second to import

    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(result.markdown())
    (out / "table.csv").write_text(result.csv())
    (out / "records.json").write_text(records.to_json(experiment, runs))
    figure.draw(result, runs, out / "figure.png")
    print(result.terminal())  # last: whoever reads it may close the pipe
    print(f"\nwrote table.md, table.csv, records.json and figure.png to {out}")
