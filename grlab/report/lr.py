"""Learning-rate grids: an experiment whose rows are all named row@rate."""

import dataclasses
from collections.abc import Sequence

from grlab.experiment import Experiment
from grlab.report.records import Record, unit
from grlab.report.render import Block
from grlab.report.stats import mean_std


@dataclasses.dataclass(frozen=True)
class Grid:
    """The block, and what has to be said of it."""

    block: Block
    notes: tuple[str, ...]
    loss: dict[str, dict[str, float | None]]  # label -> rate -> mean held-out loss over seeds; None without a result
    best: dict[str, str]  # label -> rate


def grid(experiment: Experiment, records: Sequence[Record]) -> Grid | None:
    """Held-out loss by row and learning rate; None for an experiment that is not such a grid.

    The best rate of a row is marked; one at the edge of the grid is flagged, since a better one may lie beyond it.
    """
    if not all("@" in row.name for row in experiment.rows):
        return None
    rates = sorted({row.name.partition("@")[2] for row in experiment.rows}, key=float)
    cells, loss, best, notes = {}, {}, {}, []
    for row in experiment.rows:
        label, rate = row.label.partition("@")[0].strip(), row.name.partition("@")[2]
        runs = [r for r in records if r.row == row.name]
        done = {r.seed: r.final["val_loss"] for r in runs if r.status == "done"}
        stopped = any(r.status == "diverged" for r in runs)
        loss.setdefault(label, {})[rate] = None if stopped else mean_std(done)[0]
        waiting = runs[0].status if runs else "missing"
        cells.setdefault(label, {})[rate] = "DIVERGED" if stopped else f"{mean_std(done)[0]:.4f}" if done else waiting
    for label, by_rate in loss.items():
        known = {rate: value for rate, value in by_rate.items() if value is not None}
        lacking = [rate for rate in rates if cells[label].get(rate) in (None, "missing", "unfinished", "failed")]
        if lacking:
            notes.append(f"NOT COMPLETE: {label} has no result at {', '.join(lacking)}.")
        if known:
            best[label] = min(known, key=known.get)
            cells[label][best[label]] = f"*{cells[label][best[label]]}"
            if best[label] in (rates[0], rates[-1]):
                notes.append(f"EDGE: the best rate of {label}, {best[label]}, is at the edge of the grid: widen it.")
    lines = [[label, *(row.get(rate, "-") for rate in rates), best.get(label, "-")] for label, row in cells.items()]
    title = f"Held-out loss by peak learning rate, nats per {unit(records)}"
    block = Block(title, ["row", *rates, "best"], lines)
    return Grid(block, ("* is the best of a row.", *notes), loss, best)
