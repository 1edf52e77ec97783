import itertools

import numpy as np
import pytest

from grlab import errors
from grlab.evals import choice
from tests.evals.conftest import CONTEXT, ITEMS
from tests.evals.models import by_row, noise, score, uniform

NAMES = {"identifier", "bracket", "indent", "keyword"}


def test_a_model_that_remembers_the_documents_is_always_right(benchmarks, documents):
    corpus = b"\0".join(documents)
    remembers = by_row(lambda row: row not in corpus)
    accuracies = {name: score(remembers, benchmark) for name, benchmark in benchmarks.items()}
    assert {name: accuracy.accuracy for name, accuracy in accuracies.items()} == dict.fromkeys(NAMES, 1)
    for name, accuracy in accuracies.items():
        assert accuracy == (name, 1.0, ITEMS, ITEMS, benchmarks[name].chance)


def test_batch_size_changes_nothing_and_the_model_sees_one_shape(benchmarks):
    for benchmark in benchmarks.values():
        shapes = set()

        def watched(tokens_BxT, targets_BxT):
            shapes.add((tokens_BxT.shape, tokens_BxT.dtype, targets_BxT.shape, targets_BxT.dtype))
            return noise(tokens_BxT, targets_BxT)

        accuracy = score(watched, benchmark, batch_size=64)
        assert shapes == {((64, 256), np.dtype(np.int32)) * 2}
        assert 0 < accuracy.accuracy < 1
        assert accuracy == score(noise, benchmark, batch_size=1) == score(noise, benchmark, batch_size=999)


def two_items():
    """Contexts of 6 and 2 bytes; the answers are the longer one, then the shorter one."""
    return choice.Benchmark(
        "two",
        (
            choice.Item((b"abcdef",) * 2, (b"x", b"yz"), 1, 2, 0, 6),
            choice.Item((b"gh",) * 2, (b"pqr", b"s"), 1, 2, 0, 2),
        ),
        0.5,
    )


def test_nats_are_those_of_the_candidate_alone_each_byte_given_those_before():
    seen = []

    def nats_fn(tokens_BxT, targets_BxT):
        seen.append((tokens_BxT.copy(), targets_BxT.copy()))
        # Outside the candidates' bytes every number is huge and differs from row to row.
        nats_BxT = np.where(np.isin(targets_BxT, list(b"xyzpqrs")), 0.0, 1e6 * np.arange(1, 5)[:, None])
        for byte, nats in zip(b"xyzpqrs", (3, 1, 1, 1, 1, 1, 2), strict=True):
            nats_BxT[targets_BxT == byte] = nats
        return nats_BxT

    accuracy = score(nats_fn, two_items(), seq_len=9, batch_size=4)
    assert accuracy == ("two", 1.0, 2, 2, 0.5)  # y + z = 2 < x = 3 and s = 2 < p + q + r = 3
    ((tokens_4xT, targets_4xT),) = seen
    rows = [bytes(np.trim_zeros(row, "b").astype(np.uint8)) for row in tokens_4xT]
    nexts = [bytes(np.trim_zeros(row, "b").astype(np.uint8)) for row in targets_4xT]
    assert rows == [b"abcdef", b"abcdefy", b"ghpq", b"gh"]
    assert nexts == [b"bcdefx", b"bcdefyz", b"hpqr", b"hs"]


def test_contexts_are_cut_on_the_left_alike_and_never_into_the_evidence():
    rows = []
    score(by_row(lambda row: rows.append(row) or 0), two_items(), seq_len=5, batch_size=3)
    assert rows == [b"defx", b"defyz", b"ghpqr", b"ghs"]
    with pytest.raises(errors.UsageError, match="seq_len=4: too short for two"):
        score(uniform, two_items(), seq_len=4)


def test_items_can_be_scored_at_a_seq_len_of_the_context(benchmarks, documents):
    corpus = b"\0".join(documents)
    for benchmark in benchmarks.values():
        assert score(by_row(lambda row: row not in corpus), benchmark, seq_len=CONTEXT).accuracy > 0.95


def test_a_tie_or_a_nan_is_wrong_wherever_the_answer_stands():
    def benchmark(answer):
        return choice.Benchmark("tie", (choice.Item((b"a",) * 2, (b"x", b"y"), answer, 1, 0, 1),), 0.5)

    for answer, nats in itertools.product((0, 1), (1.0, np.nan)):
        assert score(by_row(lambda row: nats), benchmark(answer), 4, 2).correct == 0
    assert score(by_row(lambda row: row[-1]), benchmark(0), 4, 2).correct == 1


def test_wrong_shapes_and_numbers_are_refused(benchmarks):
    with pytest.raises(ValueError, match="nats_fn gave"):
        score(lambda tokens, targets: np.zeros(len(tokens)), benchmarks["bracket"])
    with pytest.raises(errors.UsageError, match="batch_size"):
        score(uniform, benchmarks["bracket"], batch_size=0)
