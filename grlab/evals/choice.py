"""Multiple-choice items and how a model is scored on them.

An item is a few candidate continuations, each with the text that stands before it, and which of them is right. A row is
a context and its candidate, encoded together; the candidate's tokens are those after the first n, where n is how many
tokens the context has by itself. Each of them is scored given all before it.
"""

import enum
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from grlab import errors
from grlab.evals.loss import GreedyFn, NatsFn, nats_in_batches


class Item(NamedTuple):
    """One question: of each candidate what stands before it and what follows, and which candidate is right.

    The last `evidence` tokens of a context hold what the answer is to be found from; scoring never cuts into them.
    `document` and `offset` say where the answer of an item made from a document stands: an index into the documents,
    and the byte.
    """

    contexts: tuple[bytes, ...]
    candidates: tuple[bytes, ...]
    answer: int
    evidence: int = 1
    document: int = -1
    offset: int = -1


class Rule(enum.Enum):
    """How the prediction is made. A tie for the lowest nats counts as wrong, so that a model that cannot tell gains
    nothing from the order of the candidates."""

    TOTAL = enum.auto()  # the candidate of the lowest nats, summed
    PER_BYTE = enum.auto()  # of the lowest nats over the bytes of its text, the spaces around it not counted
    GREEDY = enum.auto()  # of an item's one candidate every token must be the model's first choice


class Benchmark(NamedTuple):
    """`chance` is the accuracy of guessing: the mean over the items of one over the number of candidates."""

    name: str
    items: tuple[Item, ...]
    chance: float
    rule: Rule = Rule.TOTAL


class Accuracy(NamedTuple):
    """accuracy = correct / items, as a fraction."""

    name: str
    accuracy: float
    correct: int
    items: int
    chance: float


class Row(NamedTuple):
    """A context, cut on the left to what fits, and a candidate: `tokens` [n], the candidate's from `start` on."""

    tokens: np.ndarray
    start: int


class Layout(NamedTuple):
    """A benchmark as rows of at most `seq_len` tokens, one for each candidate of each item in order."""

    benchmark: Benchmark
    seq_len: int
    rows: list[Row]


def lay_out(benchmark: Benchmark, encode: Callable[[bytes], np.ndarray], *, seq_len: int) -> Layout:
    """The rows of a benchmark: `encode` gives the tokens of a text.

    The contexts of an item are cut on the left to the room that its longest candidate leaves of `seq_len` tokens.
    UsageError, with the least seq_len, when that would cut into an item's evidence.
    """
    rows, least = [], 0
    for item in benchmark.items:
        lengths = {context: len(encode(context)) for context in set(item.contexts)}
        texts = [encode(c + t) for c, t in zip(item.contexts, item.candidates, strict=True)]
        # Where a tokenizer makes one token of a context's end and a whole candidate, that token is the candidate.
        starts = [min(lengths[c], len(text) - 1) for c, text in zip(item.contexts, texts, strict=True)]
        longest = max(len(text) - start for text, start in zip(texts, starts, strict=True))
        least = max(least, longest + item.evidence)
        for text, start in zip(texts, starts, strict=True):
            if start < 1:
                raise ValueError(f"{benchmark.name}: a candidate without a context: {item}")
            cut = max(start - (seq_len - longest), 0)
            rows.append(Row(text[cut:], start - cut))
    if least > seq_len:
        remedy = f"too short for {benchmark.name}: at least {least}, or leave it out of eval.downstream"
        raise errors.UsageError("seq_len", seq_len, remedy)
    return Layout(benchmark, seq_len, rows)


def score(layout: Layout, nats_fn: NatsFn, greedy_fn: GreedyFn, *, batch_size: int) -> Accuracy:
    """The accuracy of a model, which sees one shape, [batch_size, seq_len], zeros after the end of a row."""
    benchmark, rule = layout.benchmark, layout.benchmark.rule

    def misses(tokens_BxT, targets_BxT):
        return ~np.asarray(greedy_fn(tokens_BxT, targets_BxT))

    totals = iter(_totals(layout, misses if rule is Rule.GREEDY else nats_fn, batch_size))
    correct = 0
    for item in benchmark.items:
        costs = list(itertools.islice(totals, len(item.candidates)))
        if rule is Rule.PER_BYTE:
            costs = [nats / max(len(text.strip()), 1) for nats, text in zip(costs, item.candidates, strict=True)]
        answer = costs.pop(item.answer)
        if rule is Rule.GREEDY:
            correct += answer == 0
        else:
            correct += all(answer < other for other in costs)  # a tie, or a NaN, is no answer
    count = len(benchmark.items)
    return Accuracy(benchmark.name, correct / count, correct, count, benchmark.chance)


def _totals(layout: Layout, fn: NatsFn, batch_size: int) -> list[float]:
    """The sum of `fn` over each row's candidate, in order; a batch is laid out when it is scored."""
    errors.positive("eval.batch_size", batch_size)
    totals = []
    for start in range(0, len(layout.rows), batch_size):
        totals += _of_batch(layout.rows[start : start + batch_size], layout.seq_len, fn, batch_size)
    return totals


def _of_batch(rows: Sequence[Row], seq_len: int, fn: NatsFn, batch_size: int) -> list[float]:
    tokens_bxT = np.zeros((len(rows), seq_len), np.int32)
    targets_bxT = np.zeros_like(tokens_bxT)
    for row, tokens_T, targets_T in zip(rows, tokens_bxT, targets_bxT, strict=True):
        tokens_T[: len(row.tokens) - 1] = row.tokens[:-1]
        targets_T[: len(row.tokens) - 1] = row.tokens[1:]
    ((_, values_bxT),) = nats_in_batches(fn, tokens_bxT, targets_bxT, batch_size)
    spans = (slice(row.start - 1, len(row.tokens) - 1) for row in rows)
    return [math.fsum(values_T[span]) for values_T, span in zip(values_bxT, spans, strict=True)]
