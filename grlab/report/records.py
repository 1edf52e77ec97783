"""What the reports know of a run, read from its directory or from the records.json that a report leaves behind."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grlab.errors import UsageError
from grlab.experiment import Experiment

SPIKE_WINDOW = 201  # steps
SPIKE_HEIGHT = 0.1  # nats
SPIKE_DEVIATIONS = 5.0
CURVE_POINTS = 100  # the training loss is averaged over this many equal stretches of the run


@dataclasses.dataclass(frozen=True)
class Record:
    """One run. Losses are in nats a token; curves are lists of [step, loss]."""

    row: str
    seed: int
    config: dict
    provenance: dict
    final: dict | None  # final_result.json; None when the run has not ended
    step: int  # the last step seen
    heldout: list[list[float]]  # of finite losses, as is the next
    train: list[list[float]]  # means over stretches, at their last step
    spikes: int | None = None  # steps whose loss is far above its neighbours' and above the run's noise
    report_spikes: int | None = None  # the same by the report's rule, which knows no noise
    clipped: int | None = None  # steps whose gradient norm was above optim.clip

    @property
    def name(self) -> str:
        return f"{self.row}-{self.seed}"

    @property
    def status(self) -> str:
        """done, diverged, failed or unfinished."""
        if self.final is None:
            return "unfinished"
        return self.final["status"] if self.final["status"] in ("done", "diverged") else "failed"


def read(experiment: Experiment, source: str | Path) -> list[Record]:
    """The runs of `experiment`'s rows at `source`, a directory of run directories or a records.json, by row and seed.

    Raises UsageError when there is no such source, and for a run directory whose config has another row or seed than
    its name.
    """
    source = Path(source)
    order = {row.name: i for i, row in enumerate(experiment.rows)}
    in_config = {row.name: (row.name, Path(row.config).stem) for row in experiment.rows}
    if source.is_file():
        records = [Record(**run) for run in json.loads(source.read_text())["runs"]]
    elif source.is_dir():
        found = [(name, p) for p in source.iterdir() if (p / "config.json").exists() and (name := _split(p.name))]
        records = [_read_run(*name, in_config[name[0]], p) for name, p in found if name[0] in order]
    else:
        raise UsageError("runs", str(source), "no such directory or records.json; make it with `launch.py sweep`")
    return sorted((r for r in records if r.row in order), key=lambda r: (order[r.row], r.seed))


def unit(records: Sequence[Record]) -> str:
    """What a loss is a mean over: "byte", or "token" where data.tokenizer names a file."""
    return "token" if any(r.config["data"].get("tokenizer") for r in records) else "byte"


def to_json(experiment: Experiment, records: Sequence[Record]) -> str:
    """All that the reports use, a line a run; `read` gives back equal records."""
    lines = ",\n".join(json.dumps(dataclasses.asdict(r), separators=(",", ":")) for r in records)
    return f'{{"experiment":{json.dumps(experiment.name)},"runs":[\n{lines}\n]}}\n'


def _split(name: str) -> tuple[str, int] | None:
    row, _, seed = name.rpartition("-")
    return (row, int(seed)) if row and seed.isdigit() else None


def _read_run(row: str, seed: int, rows_in_config: tuple[str, ...], path: Path) -> Record:
    config = _json(path / "config.json")
    if config["seed"] != seed:
        raise UsageError("runs", str(path), f"its config has seed={config['seed']}: name the directory {row}-SEED")
    if config["row"] not in rows_in_config:
        raise UsageError("runs", str(path), f"its config is of row {config['row']!r}: take it out of this directory")
    metrics = _metrics(path / "metrics.jsonl")
    points = [m for m in metrics if m.get("loss") is not None and math.isfinite(m["loss"])]
    heldout = [[m["step"], _short(m["loss"])] for m in points if m.get("eval") == "heldout"]
    train = [(m["step"], m["loss"]) for m in points if "eval" not in m]
    final = _json(path / "final_result.json") if (path / "final_result.json").exists() else None
    provenance = _json(path / "provenance.json") if (path / "provenance.json").exists() else {}
    step = final["step"] if final else max((m["step"] for m in metrics if "step" in m), default=0)
    record = Record(row, seed, config, provenance, final, step, heldout, _smooth(train))
    if config["log"]["every"] != 1:
        return record  # spikes are of single steps
    norms = [m["grad_norm"] for m in metrics if "grad_norm" in m]
    clipped = sum(norm is None or norm > config["optim"]["clip"] for norm in norms)  # None: not finite
    report_spikes, spikes = count_spikes(np.array([loss for _, loss in train]))
    return dataclasses.replace(record, spikes=spikes, report_spikes=report_spikes, clipped=clipped)


def _json(path: Path) -> dict:
    return json.loads(path.read_text())


def _metrics(path: Path) -> list[dict]:
    lines = path.read_text().splitlines() if path.exists() else []
    records = []
    for i, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if i < len(lines) - 1:  # the last line may have been cut short by a kill
                raise UsageError("runs", str(path), f"line {i + 1} is not JSON; the file is damaged") from None
    return records


def _smooth(curve: list[tuple[int, float]]) -> list[list[float]]:
    stretches = [s for s in np.array_split(np.array(curve, float).reshape(-1, 2), CURVE_POINTS) if len(s)]
    return [[int(s[-1, 0]), _short(s[:, 1].mean())] for s in stretches]


def count_spikes(losses: np.ndarray) -> tuple[int, int]:
    """The steps whose loss is far above the median of the 201 steps that end with it, by two rules.

    By the report's (arXiv 2608.30320, section 3.3): 0.1 nats above it. At the scale cpu the noise of the batches alone
    is about that, so the second count takes of these the steps that are also above it by five standard deviations of
    the run (by the median of absolute deviations).
    """
    if not len(losses):
        return 0, 0
    padded = np.concatenate([np.full(SPIKE_WINDOW - 1, np.nan), losses.astype(float)])
    above = losses - np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, SPIKE_WINDOW), axis=1)
    noise = 1.4826 * np.median(np.abs(above - np.median(above)))
    return tuple(int(np.sum(above > h)) for h in (SPIKE_HEIGHT, max(SPIKE_HEIGHT, SPIKE_DEVIATIONS * noise)))


def _short(loss: float) -> float:
    """Six digits are all that a figure shows."""
    return float(f"{loss:.6g}")
