"""Times side by side: what is compared runs in turn, again and again, so that a busy machine is busy for all."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax


class Times(NamedTuple):
    """Seconds of each call by name; `rounds` of each, in which all of them ran in turn."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Seconds of a call."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, baseline: str) -> tuple[float, float, float]:
        """(the median, the lower and the upper quartile) over the rounds of name's time over baseline's."""
        ratios = [a / b for a, b in zip(self.seconds[name], self.seconds[baseline], strict=True)]
        lower, middle, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return middle, lower, upper


def side_by_side(calls: Mapping[str, Callable[[], object]], rounds: int, seconds: float = 0.1) -> Times:
    """Runs every call in each of `rounds` rounds, every second one backwards, and each for about `seconds`.

    A call starts work on a device and returns arrays of its result. The first calls of all, which compile, and which
    tell how often a call has to be repeated, are not counted.
    """
    repeats = {}
    for name, call in calls.items():
        jax.block_until_ready(call())
        repeats[name] = max(1, round(seconds / _time(call, 1)))
    found = {name: [] for name in calls}
    for k in range(rounds):
        for name in list(calls)[:: 1 if k % 2 == 0 else -1]:
            found[name].append(_time(calls[name], repeats[name]))
    return Times(found)


def _time(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats
