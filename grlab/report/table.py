"""The table of an experiment: one structure, rendered for a terminal, as Markdown and as CSV."""

import csv
import dataclasses
import io
import textwrap
from collections.abc import Mapping, Sequence

from grlab.experiment import Experiment, Row
from grlab.report import checks, lr, stats
from grlab.report.records import SPIKE_DEVIATIONS, SPIKE_HEIGHT, SPIKE_WINDOW, Record, unit
from grlab.report.render import Block

NONE = "-"


@dataclasses.dataclass(frozen=True)
class RowResult:
    """What one row came to. Mappings are by seed, over the runs that are done; accuracies are fractions."""

    row: Row
    runs: tuple[Record, ...]
    loss: Mapping[int, float]  # held-out, nats a token
    benchmarks: Mapping[str, Mapping[int, float]]
    average: Mapping[int, float]  # over all benchmarks
    loss_delta: stats.Paired | None  # to the baseline; None for the baseline itself, and without a shared seed
    average_delta: stats.Paired | None
    speed: float | None  # tokens a second, relative to the baseline

    @property
    def trouble(self) -> str:
        """Why the row has no verdict, in words; empty when it may have one."""
        diverged = [r for r in self.runs if r.status == "diverged"]
        if diverged:
            return "DIVERGED at step " + ", ".join(f"{r.step} (seed {r.seed})" for r in diverged)
        if self.loss:
            return ""
        return ", ".join(f"{r.status} at step {r.step} (seed {r.seed})" for r in self.runs) or "missing"

    def value(self, field: str) -> object:
        """A field of final_result.json that does not depend on the seed; None without a run that is done."""
        return next((r.final.get(field) for r in self.runs if r.status == "done"), None)


@dataclasses.dataclass(frozen=True)
class Table:
    """The results of an experiment's rows, in its order, and the notes that belong under them."""

    experiment: Experiment
    heading: str
    results: tuple[RowResult, ...]
    blocks: tuple[Block, ...]
    notes: tuple[str, ...]

    def terminal(self, width: int = 120) -> str:
        """Plain text; no line is wider than `width` unless a single cell is."""
        notes = "\n".join(
            textwrap.fill(note, width, initial_indent="- ", subsequent_indent="  ") for note in self.notes
        )
        heading = textwrap.fill(self.heading, width)
        title = f"{self.experiment.name}: {self.experiment.title}"
        return "\n\n".join([f"{title}\n{heading}", *(block.terminal(width) for block in self.blocks), notes])

    def markdown(self) -> str:
        """The same, as a Markdown section."""
        notes = "\n".join(f"- {note}" for note in self.notes)
        head = f"## {self.experiment.title}\n\n{self.heading}"
        return "\n\n".join([head, *(block.markdown() for block in self.blocks), notes]) + "\n"

    def csv(self) -> str:
        """A line a row, all digits: losses in nats a token, accuracies and the average as fractions."""
        names = _benchmark_names(self.results)
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(
            ["row", "label", "seeds", "status", "loss", "loss_std", "loss_delta", "loss_low", "loss_high", "verdict"]
            + ["bits_per_byte", *names, "average", "average_delta", "average_low", "average_high"]
            + ["params", "active_params", "flops_per_token", "speed", "published_loss", "published_average"]
        )
        for r in self.results:
            mean, std = stats.mean_std(r.loss)
            verdict = r.loss_delta.verdict if r.loss_delta and not r.trouble else None
            writer.writerow(
                [r.row.name, r.row.label, " ".join(map(str, r.loss)), r.trouble or "done", mean, std]
                + [*_numbers(r.loss_delta), verdict, stats.mean_std(_finals(r.runs, "val_bpb"))[0]]
                + [stats.mean_std(r.benchmarks.get(name, {}))[0] for name in names]
                + [stats.mean_std(r.average)[0], *_numbers(r.average_delta)]
                + [r.value("params"), r.value("active_params"), r.value("flops_per_token"), r.speed]
                + [r.row.published.get("loss"), r.row.published.get("average")]
            )
        return out.getvalue()


def build(experiment: Experiment, records: Sequence[Record]) -> Table:
    """The table of `records`, which hold runs of the experiment's rows alone."""
    by_row = {row.name: tuple(r for r in records if r.row == row.name) for row in experiment.rows}
    done = {name: [r for r in runs if r.status == "done"] for name, runs in by_row.items()}
    names = list(dict.fromkeys(name for runs in done.values() for r in runs for name in r.final["benchmarks"]))
    base = done[experiment.baseline]
    results = []
    for row in experiment.rows:
        runs, is_base = done[row.name], row.name == experiment.baseline
        loss, average = _finals(runs, "val_loss"), _averages(runs, names)
        results.append(
            RowResult(
                row=row,
                runs=by_row[row.name],
                loss=loss,
                benchmarks={n: _benchmark(runs, n) for n in names},
                average=average,
                loss_delta=None if is_base else stats.paired(loss, _finals(base, "val_loss")),
                average_delta=None if is_base else stats.paired(average, _averages(base, names)),
                speed=stats.median_ratio(_finals(runs, "tokens_per_s"), _finals(base, "tokens_per_s")),
            )
        )
    results = tuple(results)
    flagged = checks.flags(experiment, records)
    marks, footnotes = _footnotes(results, flagged)
    grid = lr.grid(experiment, records)
    if grid:
        blocks, notes = (grid.block,), grid.notes
    else:
        blocks = (_loss_block(experiment, results, marks), _cost_block(experiment, results, marks))
        if names:
            blocks = (blocks[0], _benchmark_block(experiment, results, marks, names), blocks[1])
        notes = (*_incomplete(results), *_notes(experiment, results, names))
        if experiment.stability:
            blocks = (_stability_block(results, marks), *blocks)
            notes = (_SPIKES, *notes)
    if unclean := checks.unclean(records):
        footnotes.append(f"Made with uncommitted changes to the code: {', '.join(unclean)}.")
    notes = (*footnotes, *notes, *experiment.notes)
    return Table(experiment, _heading(experiment, records), results, blocks, notes)


def _finals(runs: Sequence[Record], field: str) -> dict[int, float]:
    return {r.seed: r.final[field] for r in runs if r.status == "done" and r.final[field] is not None}


def _benchmark(runs: Sequence[Record], name: str) -> dict[int, float]:
    return {r.seed: r.final["benchmarks"][name] for r in runs if name in r.final["benchmarks"]}


def _averages(runs: Sequence[Record], names: Sequence[str]) -> dict[int, float]:
    """The mean over all of `names`; a run that lacks one has no average."""
    scores = {r.seed: [r.final["benchmarks"].get(name) for name in names] for r in runs}
    return {seed: sum(s) / len(s) for seed, s in scores.items() if s and None not in s}


def _benchmark_names(results: Sequence[RowResult]) -> list[str]:
    return list(results[0].benchmarks)


def _numbers(delta: stats.Paired | None) -> list[float | None]:
    return [delta.mean, *(delta.interval or (None, None))] if delta else [None] * 3


def _published_delta(experiment: Experiment, row: Row, field: str, digits: int) -> str:
    ours, base = row.published.get(field), experiment.row(experiment.baseline).published.get(field)
    if row.name == experiment.baseline or ours is None or base is None:
        return NONE
    return f"{ours - base:+.{digits}f}"


def _delta(result: RowResult, delta: stats.Paired | None, experiment: Experiment, digits: int, scale: float = 1) -> str:
    if result.trouble:
        return result.trouble
    if result.row.name == experiment.baseline:
        return "baseline"
    if delta is None:
        return "no shared seed"
    text = f"{scale * delta.mean:+.{digits}f}"
    if delta.interval:
        text += f" [{scale * delta.interval[0]:+.{digits}f}, {scale * delta.interval[1]:+.{digits}f}]"
    return text


def _plus_minus(values: Mapping[int, float], digits: int, scale: float = 1) -> str:
    mean, std = stats.mean_std(values)
    if mean is None:
        return NONE
    return f"{scale * mean:.{digits}f}" + (f" ± {scale * std:.{digits}f}" if std is not None else "")


def _seed_ranges(seeds: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> '0-2,5'."""
    parts = []
    for seed in sorted(seeds):
        if parts and seed == parts[-1][1] + 1:
            parts[-1][1] = seed
        else:
            parts.append([seed, seed])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or NONE


def _figure(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _loss_block(experiment: Experiment, results: Sequence[RowResult], marks: Mapping[str, str]) -> Block:
    published = any("loss" in r.row.published for r in results)
    header = ["row", "loss", "Δ to baseline [95 %]", "verdict", "bits/byte", "seeds"]
    lines = []
    for r in results:
        verdict = NONE if r.trouble or r.loss_delta is None else r.loss_delta.verdict
        bpb = stats.mean_std(_finals(r.runs, "val_bpb"))[0]
        cells = [r.row.label + marks.get(r.row.name, ""), _plus_minus(r.loss, 4)]
        cells += [_delta(r, r.loss_delta, experiment, 4), verdict, _figure(bpb, 4), _seed_ranges(list(r.loss))]
        if published:
            cells += [_figure(r.row.published.get("loss"), 3), _published_delta(experiment, r.row, "loss", 3)]
        lines.append(cells)
    title = f"Held-out loss, nats per {unit([run for r in results for run in r.runs])}"
    return Block(title, header + (["published", "Δ"] if published else []), lines)


def _benchmark_block(
    experiment: Experiment, results: Sequence[RowResult], marks: Mapping[str, str], names: Sequence[str]
) -> Block:
    published = any("average" in r.row.published for r in results)
    header = ["row", "average", "Δ to baseline [95 %]", "verdict", *(["published", "Δ"] if published else []), *names]
    lines = []
    for r in results:
        verdict = NONE if r.trouble or r.average_delta is None else r.average_delta.verdict
        cells = [r.row.label + marks.get(r.row.name, "")]
        cells += [_plus_minus(r.average, 2, 100), _delta(r, r.average_delta, experiment, 2, 100), verdict]
        if published:
            cells += [_figure(r.row.published.get("average"), 2), _published_delta(experiment, r.row, "average", 2)]
        means = [stats.mean_std(r.benchmarks[name])[0] for name in names]
        cells += [_figure(None if mean is None else 100 * mean, 1) for mean in means]
        lines.append(cells)
    return Block("Benchmarks, accuracy in %", header, lines)


def _cost_block(experiment: Experiment, results: Sequence[RowResult], marks: Mapping[str, str]) -> Block:
    lines = []
    fields = ["params"]  # and those of them that a token makes use of, where there are such as it does not
    if any(r.value("active_params") not in (None, r.value("params")) for r in results):
        fields.append("active_params")
    for r in results:
        flops = r.value("flops_per_token")
        cells = [r.row.label + marks.get(r.row.name, "")]
        cells += [NONE if r.value(field) is None else f"{r.value(field):,}" for field in fields]
        cells += [NONE if flops is None else f"{flops / 1e6:,.2f}", NONE if r.speed is None else f"{r.speed:.2f}"]
        lines.append(cells)
    header = ["row", "parameters", "for a token"][: 1 + len(fields)] + ["MFLOP/token", "tokens/s, relative"]
    return Block("Cost", header, lines)


_SPIKES = (
    f"Spikes: steps whose training loss is above the median of the {SPIKE_WINDOW} steps that end with it by more than "
    f"{SPIKE_HEIGHT} nats (the report's rule), which the noise of small batches alone exceeds. Above noise: those of "
    f"them that are above it by {SPIKE_DEVIATIONS:.0f} standard deviations of the run's own noise, too. Clipped: steps "
    "whose gradient norm was above optim.clip. All are for 10,000 steps, over all seeds: what comes once in that many "
    "steps cannot be seen in fewer."
)


def _stability_block(results: Sequence[RowResult], marks: Mapping[str, str]) -> Block:
    lines = []
    counts = ("report_spikes", "spikes", "clipped")
    for r in results:
        steps = sum(run.step for run in r.runs)
        known = steps and all(getattr(run, count) is not None for run in r.runs for count in counts)
        rates = [f"{1e4 * sum(getattr(run, c) for run in r.runs) / steps:.1f}" if known else NONE for c in counts]
        diverged = sum(run.status == "diverged" for run in r.runs)
        cells = [r.row.label + marks.get(r.row.name, ""), *rates, f"{diverged} of {len(r.runs)}", f"{steps:,}"]
        lines.append(cells)
    return Block("Stability", ["row", "spikes", "above noise", "clipped", "diverged", "steps"], lines)


def _footnotes(results: Sequence[RowResult], flagged: Mapping[str, list[str]]) -> tuple[dict[str, str], list[str]]:
    """A letter for each flagged row, and what it stands for."""
    letters = {name: chr(ord("a") + i) if i < 26 else f"a{i}" for i, name in enumerate(flagged)}
    marks = {name: f" [{letter}]" for name, letter in letters.items()}
    labels = {r.row.name: r.row.label for r in results}
    return marks, [
        f"[{letter}] NOT ALIKE: {labels[name]}: {'; '.join(flagged[name])}" for name, letter in letters.items()
    ]


def _incomplete(results: Sequence[RowResult]) -> list[str]:
    """Runs that are not in the figures, and rows whose seeds are not the others'."""
    notes = []
    seeds = sorted({run.seed for r in results for run in r.runs})
    for r in results:
        lacking = [f"{run.status} at step {run.step} (seed {run.seed})" for run in r.runs if run.status != "done"]
        missing = [seed for seed in seeds if seed not in {run.seed for run in r.runs}]
        lacking += [f"missing (seed {seed})" for seed in missing]
        if lacking and r.runs:  # a row without any run says so in the table
            what = f"{r.row.label}: {', '.join(lacking)}"
            notes.append(f"NOT COMPLETE: {what}; its figures are of the seeds that are done.")
    return notes


def _notes(experiment: Experiment, results: Sequence[RowResult], names: Sequence[str]) -> tuple[str, ...]:
    baseline = experiment.row(experiment.baseline).label
    notes = [
        f"± is the standard deviation over seeds. Δ is the mean of the differences from {baseline} at the same seed, "
        "with its 95 % interval (Student t over seeds), for each comparison by itself: not corrected for the number of "
        "rows. A verdict is given where the interval excludes zero, and none to a row of which a seed diverged."
    ]
    if any(r.loss_delta and r.loss_delta.interval is None for r in results):
        notes.append("One seed gives a difference and no interval: nothing is resolved by it.")
    if any(r.loss_delta and len(r.loss_delta.by_seed) == 2 for r in results):
        notes.append("Two seeds give an interval of 12.7 standard errors to each side: little is resolved by them.")
    if names:
        finals = [run.final for r in results for run in r.runs if run.status == "done"]
        items = {name: n for final in finals for name, n in final["benchmark_items"].items()}
        chance = {name: x for final in finals for name, x in final["benchmark_chance"].items()}
        each = "; ".join(f"{name}: {items[name]} items, chance {100 * chance[name]:.1f}" for name in names)
        notes.append(
            f"Benchmarks ({each}): every run answers the same items; the interval covers the seeds, not the choice of "
            "items. Δ is in points."
        )
    notes.append("Speed: the median over seeds of tokens/s against the baseline at the same seed.")
    if experiment.source:
        notes.append(f"Published figures: {experiment.source}. Their Δ is to the published {baseline}.")
    return tuple(notes)


def _heading(experiment: Experiment, records: Sequence[Record]) -> str:
    """What the reference run was, in one line."""
    if not records:
        return "no runs"
    r = next((r for r in records if r.row == experiment.baseline), records[0])
    c = r.config
    tokens = c["steps"] * c["batch_size"] * c["seq_len"] / 1e6
    length = f"{c['steps']} steps of {c['batch_size']} x {c['seq_len']} tokens ({tokens:.2f} M)"
    return f"scale {c['scale']}, {length}, data {c['data']['name']}, {checks.origin(r)}"
