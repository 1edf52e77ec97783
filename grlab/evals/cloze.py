"""Multiple-choice items and how a model of bytes is scored on them.

An item is a context, the bytes before one place in a document, and a few candidate continuations, one of them what the
document says. The prediction is the candidate of the lowest total nats. A tie for the lowest counts as wrong, so a
model that cannot tell gains nothing from the order of the candidates.
"""

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from grlab import errors
from grlab.evals.loss import NatsFn, nats_in_batches


class Item(NamedTuple):
    """One question: the bytes before, what may follow, and which of it does.

    The last `evidence` bytes of the context hold what the answer is to be found from; scoring never cuts into them.
    `document` and `offset` say where the answer stands: an index into the documents, and the byte.
    """

    context: bytes
    candidates: tuple[bytes, ...]
    answer: int
    evidence: int
    document: int
    offset: int


class Benchmark(NamedTuple):
    """`chance` is the accuracy of guessing: one over the number of candidates, the same for all items."""

    name: str
    items: tuple[Item, ...]
    chance: float


class Accuracy(NamedTuple):
    """accuracy = correct / items, as a fraction."""

    name: str
    accuracy: float
    correct: int
    items: int
    chance: float


def score(nats_fn: NatsFn, benchmark: Benchmark, *, seq_len: int, batch_size: int) -> Accuracy:
    """The accuracy of the model behind `nats_fn`, which sees one shape, [batch_size, seq_len], zeros after the end.

    A row is the context and one candidate; nats are summed over the candidate's bytes alone. All rows of an item have
    the same context, cut on the left where context and longest candidate are more than `seq_len`. UsageError when
    that would cut into an item's evidence.
    """
    spans = []  # of each row: where the candidate's bytes are among the targets
    tokens_NxT = np.zeros((sum(len(item.candidates) for item in benchmark.items), seq_len), np.int32)
    targets_NxT = np.zeros_like(tokens_NxT)
    for item in benchmark.items:
        keep = min(len(item.context), seq_len - max(map(len, item.candidates)))
        if keep < max(item.evidence, 1):
            raise errors.UsageError("seq_len", seq_len, f"too short for {benchmark.name}: at least eval.cloze_context")
        for candidate in item.candidates:
            row = np.frombuffer(item.context[len(item.context) - keep :] + candidate, np.uint8)
            tokens_NxT[len(spans), : len(row) - 1] = row[:-1]
            targets_NxT[len(spans), : len(row) - 1] = row[1:]
            spans.append(slice(keep - 1, len(row) - 1))

    nats = []
    for start, nats_bxT in nats_in_batches(nats_fn, tokens_NxT, targets_NxT, batch_size):
        nats += [math.fsum(nats_T[spans[start + i]]) for i, nats_T in enumerate(nats_bxT)]

    correct, rows = 0, iter(nats)
    for item in benchmark.items:
        of_candidates = list(itertools.islice(rows, len(item.candidates)))
        answer = of_candidates.pop(item.answer)
        correct += all(answer < other for other in of_candidates)  # a tie, or a NaN, is no answer
    count = len(benchmark.items)
    return Accuracy(benchmark.name, correct / count, correct, count, benchmark.chance)


def score_all(
    nats_fn: NatsFn, benchmarks: Mapping[str, Benchmark], *, seq_len: int, batch_size: int
) -> dict[str, Accuracy]:
    """`score` of each benchmark, by name."""
    return {
        name: score(nats_fn, benchmark, seq_len=seq_len, batch_size=batch_size)
        for name, benchmark in benchmarks.items()
    }
