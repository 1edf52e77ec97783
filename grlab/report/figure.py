"""One figure of an experiment: its loss curves, and the paired differences that the table states."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.figure
import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import ScaledTranslation, Transform

from grlab.report import lr
from grlab.report.records import Record, unit
from grlab.report.table import RowResult, Table

# Okabe and Ito's palette, told apart with any colour vision; black is the baseline's.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)))  # beyond six rows the colours come round again
_BASELINE = "#000000"
_FAINT = "#999999"

_MANY = 8  # with as many rows the curves are named by the line beside a row's name below them, and seeds are left out
_STEEP = 0.2  # the first part of a run, steep and alike in all rows, is let out of the frame


def draw(table: Table, records: Sequence[Record], path: str | Path) -> None:
    """Writes a PNG, 1600 pixels wide: for a learning-rate grid loss against rate, else curves and differences."""
    figure = matplotlib.figure.Figure(figsize=(10, 5), dpi=160, layout="constrained")
    figure.suptitle(table.experiment.title, fontsize=12, x=0.01, ha="left")
    grid = lr.grid(table.experiment, records)
    if grid:
        _rates(figure.subplots(), grid, unit(records))
    else:
        many = len(table.results) >= _MANY
        if many:
            heights = (4, 0.5 * len(table.results))  # inches
            figure.set_figheight(sum(heights))
            above, below = figure.subfigures(2, 1, height_ratios=heights)
            axes = above.subplot_mosaic([["curves", "gaps"]]) | below.subplot_mosaic([["final"]])
        else:
            axes = figure.subplot_mosaic([["curves", "final"], ["gaps", "final"]], width_ratios=(1.15, 1))
            axes["gaps"].sharex(axes["curves"])
            axes["curves"].tick_params(labelbottom=False)
        lines = _lines(table)
        _curves(axes["curves"], table, lines, many, unit(records))
        _gaps(axes["gaps"], table, lines, many)
        _differences(axes["final"], table, lines, many)
    figure.savefig(path, metadata={"Software": None})


class _Line(NamedTuple):
    colour: str
    dashes: object  # a linestyle of matplotlib


def _line(i: int) -> _Line:
    """The i-th line of a figure: no two of the first 24 are alike."""
    return _Line(_COLOURS[i % len(_COLOURS)], _DASHES[i // len(_COLOURS) % len(_DASHES)])


def _lines(table: Table) -> dict[str, _Line]:
    others = [r.row.name for r in table.results if r.row.name != table.experiment.baseline]
    return {table.experiment.baseline: _Line(_BASELINE, "-")} | {name: _line(i) for i, name in enumerate(others)}


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=9)


def _curves(ax: Axes, table: Table, lines: dict[str, _Line], many: bool, unit: str) -> None:
    """Training loss in stretches (thin: a seed, unless there are many rows; thick: the mean), held-out loss (dots)."""
    _plain(ax)
    lows, highs = [], []
    for r in table.results:
        colour, dashes = lines[r.row.name]
        for run in r.runs:
            if run.train and not many:
                ax.plot(*np.array(run.train).T, color=colour, linewidth=0.5, alpha=0.3)
        done = [run for run in r.runs if run.status == "done"]
        train, heldout = _mean([run.train for run in done]), _mean([run.heldout for run in done])
        if len(train):
            ax.plot(*train.T, color=colour, linestyle=dashes, linewidth=1.4)
            late = train[train[:, 0] >= train[-1, 0] * _STEEP, 1]
            lows, highs = [*lows, late.min()], [*highs, late.max()]
        if len(heldout):
            ax.plot(*heldout.T, color=colour, linewidth=0, marker="o", markersize=4)
            lows = [*lows, heldout[:, 1].min()]
    if lows and highs:
        ax.set_ylim(min(lows) - 0.05 * (max(highs) - min(lows)), max(highs))
    ax.set_xlabel("step" if many else "", fontsize=9)
    ax.set_title(f"Loss, nats per {unit}: training (lines), held-out (dots)", fontsize=10, loc="left")


def _gaps(ax: Axes, table: Table, lines: dict[str, _Line], many: bool) -> None:
    """The same curves as differences from the baseline at the same seed, in which the batches' noise cancels.

    With many rows they are those of the held-out losses alone.
    """
    _plain(ax)
    base = {run.seed: run for r in table.results if r.row.name == table.experiment.baseline for run in r.runs}
    ends, seen = [], []
    for r in table.results:
        if r.row.name == table.experiment.baseline:
            continue
        colour, dashes = lines[r.row.name]
        pairs = [(run, base[run.seed]) for run in r.runs if run.status == "done" and run.seed in base]
        gaps = [] if many else [_minus(run.train, other.train) for run, other in pairs]
        for gap in gaps:
            ax.plot(*np.array(gap).reshape(-1, 2).T, color=colour, linewidth=0.5, alpha=0.3)
        mean, heldout = _mean(gaps), _mean([_minus(run.heldout, other.heldout) for run, other in pairs])
        ax.plot(*mean.T, color=colour, linestyle=dashes, linewidth=1.4)
        ax.plot(*heldout.T, color=colour, linestyle=dashes, linewidth=1.4 if many else 0, marker="o", markersize=4)
        late = [np.array(gap)[int(len(gap) * _STEEP) :, 1] for gap in gaps if len(gap)]
        seen += [x for part in (*late, heldout[:, 1]) for x in part]
        end = heldout if len(heldout) else mean
        if len(end):
            ends.append((end[-1], r.row.label, lines[r.row.name]))
    ax.axhline(0, color=_BASELINE, linewidth=1)
    if seen:
        low, high = min(*seen, 0), max(*seen, 0)
        ax.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
    ax.set_xlabel("step", fontsize=9)
    baseline = table.experiment.row(table.experiment.baseline).label
    what = "Held-out difference" if many else "Difference"
    ax.set_title(f"{what} from {baseline} at the same seed", fontsize=10, loc="left")
    if not many:
        _label_ends(ax, ends + [(np.array([end[0], 0.0]), baseline, _Line(_BASELINE, "-")) for end, _, _ in ends[:1]])


def _minus(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    other = dict(map(tuple, b))
    return [(step, loss - other[step]) for step, loss in a if step in other]


def _mean(curves: Sequence[Sequence[Sequence[float]]]) -> np.ndarray:
    """The mean [points, 2] of curves over the steps that all of them have."""
    curves = [dict(map(tuple, c)) for c in curves]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    return np.array([[s, np.mean([c[s] for c in curves])] for s in steps]).reshape(-1, 2)


def _label_ends(ax: Axes, ends: list[tuple[np.ndarray, str, _Line]]) -> None:
    """Names the curves, right of the last, in the order of their ends and pushed apart so that no two names overlap."""
    if not ends:
        return
    low, high = ax.get_ylim()
    points = ax.get_position().height * ax.figure.get_figheight() * 72
    gap = 13 / points * (high - low)
    ends = sorted(ends, key=lambda e: e[0][1])
    heights = [end[1] for end, _, _ in ends]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    shift = np.mean(heights) - np.mean([end[1] for end, _, _ in ends])  # keep the names about their curves
    right = max(end[0] for end, _, _ in ends)
    for height, (end, label, line) in zip(heights, ends, strict=True):
        ax.annotate(
            label, end, xytext=(right, height - shift), textcoords=_offset(ax, 14), va="center", fontsize=9,
            color=line.colour, annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": line.colour, "linestyle": line.dashes, "linewidth": 0.7, "alpha": 0.6,
                "shrinkA": 1, "shrinkB": 3,
            },
        )  # fmt: skip


def _offset(ax: Axes, points: float) -> Transform:
    return ax.transData + ScaledTranslation(points / 72, 0, ax.figure.dpi_scale_trans)


def _differences(ax: Axes, table: Table, lines: dict[str, _Line], many: bool) -> None:
    """A line a row: its seeds (small dots), the mean difference to the baseline and the 95 % interval.

    With many rows the line that a row has among the curves stands between its name and the axis.
    """
    _plain(ax)
    ax.spines["left"].set_visible(False)
    rows = [r for r in table.results if r.row.name != table.experiment.baseline]
    baseline = table.experiment.row(table.experiment.baseline).label
    for y, r in enumerate(rows):
        _difference(ax, -y, r, lines[r.row.name].colour)
    ax.axvline(0, color=_BASELINE, linewidth=1)
    ax.set_yticks([-y for y in range(len(rows))], [r.row.label for r in rows], fontsize=10)
    for tick, r in zip(ax.get_yticklabels(), rows, strict=True):
        tick.set_color(lines[r.row.name].colour)
    ax.tick_params(axis="y", length=0, pad=40 if many else 3)
    if many:
        beside = ax.get_yaxis_transform() + ScaledTranslation(-36 / 72, 0, ax.figure.dpi_scale_trans)
        across = ScaledTranslation(30 / 72, 0, ax.figure.dpi_scale_trans)
        for y, r in enumerate(rows):
            line = lines[r.row.name]
            ax.annotate(
                "", (0, -y), xytext=(0, -y), xycoords=beside, textcoords=beside + across, annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": line.colour, "linestyle": line.dashes, "linewidth": 1.6},
            )  # fmt: skip
    ax.set_ylim(-len(rows) + (0.25 if many else 0.4), 0.6)
    ax.set_xlabel(f"difference in held-out loss from {baseline}, same seed", fontsize=9)
    ax.set_title("At the end: seeds, mean and 95 % interval", fontsize=10, loc="left")


def _difference(ax: Axes, y: int, r: RowResult, colour: str) -> None:
    if r.trouble or r.loss_delta is None:
        ax.annotate(
            r.trouble or "no shared seed", (0, y), xytext=(-6, 0), textcoords="offset points",
            ha="right", va="center", fontsize=9, color=_FAINT,
        )  # fmt: skip
        return
    d = r.loss_delta
    if d.interval:
        ax.plot(d.interval, [y, y], color=colour, linewidth=2, solid_capstyle="butt")
    ax.plot(list(d.by_seed.values()), [y + 0.17] * len(d.by_seed), "o", color=colour, markersize=3.5, alpha=0.55, mew=0)
    ax.plot(d.mean, y, "o", color=colour, markersize=7, mfc=colour if d.resolved else "white")
    ax.annotate(
        f"{d.mean:+.4f}  {d.verdict}", (d.mean, y), xytext=(0, -10), textcoords="offset points", ha="center", va="top",
        fontsize=9, color=colour, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )  # fmt: skip


def _rates(ax: Axes, grid: lr.Grid, unit: str) -> None:
    """Held-out loss against the peak learning rate, a line a row, the best of each filled."""
    _plain(ax)
    ends = []
    for i, (label, by_rate) in enumerate(grid.loss.items()):
        line = _line(i - 1) if i else _Line(_BASELINE, "-")
        points = np.array(sorted((float(rate), x) for rate, x in by_rate.items() if x is not None)).reshape(-1, 2)
        if not len(points):
            continue
        ax.plot(
            *points.T, color=line.colour, linestyle=line.dashes, linewidth=1.4, marker="o", markersize=6, mfc="white"
        )
        best = grid.best[label]
        ax.plot(float(best), by_rate[best], "o", color=line.colour, markersize=6)
        ends.append((points[-1], label, line))
    rates = sorted({rate for by_rate in grid.loss.values() for rate in by_rate}, key=float)
    ax.set_xscale("log")
    ax.set_xticks([float(rate) for rate in rates], rates)
    ax.minorticks_off()
    ax.set_xlabel("peak learning rate", fontsize=9)
    ax.set_title(f"Held-out loss, nats per {unit}; filled: the best of a row", fontsize=10, loc="left")
    _label_ends(ax, ends)
