"""An experiment: the rows that are compared, the row they are compared with, and the published figures beside them."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from grlab.config import covered, import_file
from grlab.errors import UsageError, unknown

COMPARED = ("residual", "optim.lr")  # what the rows of an experiment are there to differ in
SHARED = ("residual.gated_norm", "residual.stream_dtype")  # switches of every row, and no part of what a system is
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+@-]*")


@dataclasses.dataclass(frozen=True)
class Row:
    """One residual connection, as it is trained.

    `config` is a config file, relative to the repository. `overrides` maps a field ("optim.lr") to the value it is
    given on the command line. `published` maps "loss", "average" and benchmark names to published figures. `differs`
    lists the config fields, or prefixes of fields, beside `residual` and `optim.lr` in which the row may differ from
    the experiment's baseline (`Experiment.may_differ`).
    """

    name: str
    config: str
    label: str
    overrides: Mapping[str, object] = dataclasses.field(default_factory=dict)
    published: Mapping[str, float] = dataclasses.field(default_factory=dict)
    differs: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Rows and the baseline that each is paired with. Raises UsageError for names that do not fit together."""

    name: str
    title: str
    baseline: str  # the name of a row
    rows: tuple[Row, ...]
    source: str = ""  # where the published figures come from
    notes: tuple[str, ...] = ()  # what a reader of the table has to know; printed under it
    stability: bool = False  # whether the table counts loss spikes and clipped gradients

    def __post_init__(self):
        names = [row.name for row in self.rows]
        for name in (self.name, *names):
            if not _NAME.fullmatch(name):
                raise UsageError("name", name, "names a directory: use letters, digits and _ . + @ - only")
        for name in names:
            if names.count(name) > 1:
                raise UsageError("rows", name, "two rows have this name; give each its own")
        if self.baseline not in names:
            raise unknown("baseline", self.baseline, names)

    def row(self, name: str) -> Row:
        """The row of that name; UsageError with the nearest name when there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        raise unknown("row", name, [row.name for row in self.rows])

    def some(self, names: str) -> tuple[Row, ...]:
        """The rows `names` ("gr,mhc"), in that order; all of them where it is empty."""
        return tuple(self.row(name) for name in names.strip(",").split(",")) if names else self.rows

    def may_differ(self, row: Row, field: str) -> bool:
        """Whether `row` may differ from the baseline in the config field `field`.

        It may in its name and its `differs`; in what it or the baseline overrides of `residual` and `optim.lr`, one
        switch at a time; and where it has another config file than the baseline in all of these, but for the switches
        that every row has.
        """
        baseline = self.row(self.baseline)
        if covered(field, ("row", *row.differs)):
            return True
        if not covered(field, COMPARED):
            return False
        overridden = field in row.overrides or field in baseline.overrides
        return overridden or (row.config != baseline.config and field not in SHARED)


def switches(**values: object) -> dict[str, object]:
    """The overrides of a row that set switches of `residual`: switches(rank=4) is {"residual.rank": 4}."""
    return {f"residual.{name}": value for name, value in values.items()}


def rate_grid(experiment: Experiment, rates: Sequence[str], steps: int) -> Experiment:
    """The rows of `experiment`, each at every one of the peak learning rates `rates` ("1e-2"), for `steps` updates.

    Its table is a grid of losses by row and rate, with the best of each row.
    """
    rows = tuple(
        dataclasses.replace(
            row,
            name=f"{row.name}@{rate}",
            label=f"{row.label} @ {rate}",
            overrides={**row.overrides, "optim.lr": float(rate), "steps": steps},
            published={},
        )
        for rate in rates
        for row in experiment.rows
    )
    return Experiment(
        name=f"lr_{experiment.name}",
        title=f"Learning rates: {experiment.title}",
        baseline=f"{experiment.baseline}@{rates[0]}",
        rows=rows,
    )


def load(path: str | Path) -> Experiment:
    """The `EXPERIMENT` that the Python file at `path` defines. Raises UsageError when there is no such thing."""
    experiment = import_file("experiment", path, "experiments", "EXPERIMENT")
    if not isinstance(experiment, Experiment):
        raise UsageError("experiment", str(path), "must define EXPERIMENT, a grlab.experiment.Experiment")
    return experiment
