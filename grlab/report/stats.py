"""The statistics of a comparison: what a handful of seeds says, and what it does not."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import scipy.stats


@dataclasses.dataclass(frozen=True)
class Paired:
    """The mean over seeds of (row - baseline at the same seed) and its 95 % interval, None when there is one seed."""

    mean: float
    interval: tuple[float, float] | None
    by_seed: Mapping[int, float]

    @property
    def resolved(self) -> bool:
        """Whether the interval excludes zero."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)

    @property
    def verdict(self) -> str:
        """lower, higher, not resolved, or one seed."""
        if self.interval is None:
            return "one seed"
        return ("lower" if self.mean < 0 else "higher") if self.resolved else "not resolved"


def paired(row: Mapping[int, float], baseline: Mapping[int, float], confidence: float = 0.95) -> Paired | None:
    """The paired comparison over the seeds that both have; None when there is none.

    The interval is Student's t with (seeds - 1) degrees of freedom. Rows with one seed share the data order and the
    initial values of what they share, so that most of the noise of a seed cancels in its difference.
    """
    by_seed = {seed: row[seed] - baseline[seed] for seed in sorted(row.keys() & baseline.keys())}
    if not by_seed:
        return None
    differences = np.array(list(by_seed.values()))
    mean, n = float(differences.mean()), len(differences)
    if n == 1:
        return Paired(mean, None, by_seed)
    half = float(scipy.stats.t.ppf(0.5 + confidence / 2, n - 1) * differences.std(ddof=1) / math.sqrt(n))
    return Paired(mean, (mean - half, mean + half), by_seed)


def mean_std(values: Mapping[int, float]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation over seeds; None where there are too few values."""
    x = np.array(list(values.values()))
    return (float(x.mean()) if len(x) else None), (float(x.std(ddof=1)) if len(x) > 1 else None)


def median_ratio(row: Mapping[int, float], baseline: Mapping[int, float]) -> float | None:
    """The median over shared seeds of row / baseline; None when there is none."""
    ratios = [row[seed] / baseline[seed] for seed in row.keys() & baseline.keys()]
    return float(np.median(ratios)) if ratios else None
