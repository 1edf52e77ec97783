import itertools

import numpy as np
import pytest

from grlab.data import batches
from grlab.errors import UsageError

SEQ_LEN, WINDOWS, BATCH = 7, 50, 8
TOKENS = np.random.default_rng(0).integers(0, 256, SEQ_LEN * WINDOWS + 4, dtype=np.uint8)


def make(seed=0, **changes):
    return batches.train_batches(TOKENS, **dict(seq_len=SEQ_LEN, batch_size=BATCH, seed=seed) | changes)


def order(ds, count):
    """The window numbers of the first `count` rows."""
    starts = {bytes(TOKENS[i * SEQ_LEN :][:SEQ_LEN]): i for i in range(WINDOWS)}
    rows = itertools.chain.from_iterable(ds[step]["tokens_BxT"] for step in range(-(-count // BATCH)))
    return [starts[bytes(row.astype(np.uint8))] for row in itertools.islice(rows, count)]


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def test_a_batch_is_windows_and_the_tokens_that_follow():
    batch = make()[3]
    assert {key: (x.shape, x.dtype) for key, x in batch.items()} == dict.fromkeys(
        ("tokens_BxT", "targets_BxT"), ((BATCH, SEQ_LEN), np.int32)
    )
    flat = list(TOKENS)
    for i, tokens, targets in zip(order(make(), 4 * BATCH)[3 * BATCH :], *batch.values(), strict=True):
        start = i * SEQ_LEN
        assert list(tokens) == flat[start : start + SEQ_LEN]
        assert list(targets) == flat[start + 1 : start + SEQ_LEN + 1]


def test_each_epoch_has_every_window_once_in_an_order_of_its_own():
    read = order(make(), 4 * WINDOWS)
    epochs = [read[e * WINDOWS :][:WINDOWS] for e in range(4)]
    assert all(sorted(epoch) == list(range(WINDOWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_seeds_share_no_epoch():
    orders = [order(make(seed), 3 * WINDOWS) for seed in (0, 1, 2, 2**40)]
    epochs = {tuple(read[e * WINDOWS :][:WINDOWS]) for read in orders for e in range(3)}
    assert len(epochs) == 12  # seed + epoch as the shuffle's seed would give 5


def test_a_batch_depends_on_seed_and_step_alone():
    ahead = make(seed=5)
    expected = [ahead[step] for step in range(20)]
    fresh = make(seed=5)
    assert all(equal(fresh[step], expected[step]) for step in (17, 3, 17, 0))
    assert not equal(expected[0], make(seed=6)[0])


@pytest.mark.parametrize("start", [0, 1, 13, 10**7])
def test_the_iterator_resumes_anywhere(start):
    ds = make()
    read = list(itertools.islice(batches.iterate(make(), start), 40))  # more than are read ahead
    assert all(equal(batch, ds[start + i]) for i, batch in enumerate(read))


def test_too_short_a_corpus_is_one_line():
    assert make(batch_size=WINDOWS)[0]["tokens_BxT"].shape == (WINDOWS, SEQ_LEN)
    one = batches.train_batches(TOKENS[: SEQ_LEN + 1], seq_len=SEQ_LEN, batch_size=1, seed=0)
    assert list(one[9]["targets_BxT"][0]) == list(TOKENS[1 : SEQ_LEN + 1])
    for tokens, size in ((TOKENS, WINDOWS + 1), (TOKENS[:SEQ_LEN], 1), (TOKENS[:0], 1)):
        with pytest.raises(UsageError, match=f"^batch_size={size}: the {len(tokens)} training tokens give"):
            batches.train_batches(tokens, seq_len=SEQ_LEN, batch_size=size, seed=0)
    with pytest.raises(UsageError, match="^seq_len=0"):
        make(seq_len=0)


HELDOUT = [np.frombuffer(text, np.uint8) for text in (b"first", b"second document", b"3")]
STREAM = list(b"first\0second document\x003\0")


@pytest.mark.parametrize("seq_len", [1, 4, 6, 8, 24, 100])
@pytest.mark.parametrize("max_tokens", [1, 6, 7, 23, 24, 1000])
def test_held_out_windows_hold_every_target_once(seq_len, max_tokens):
    tokens, targets, weights = batches.heldout_windows(HELDOUT, separator=0, seq_len=seq_len, max_tokens=max_tokens)
    wanted = STREAM[:max_tokens]
    assert tokens.shape == targets.shape == weights.shape == (-(-len(wanted) // seq_len), seq_len)
    assert (tokens.dtype, targets.dtype, weights.dtype) == (np.int32, np.int32, np.float32)
    assert set(weights.ravel()) <= {0.0, 1.0}
    scored = weights.ravel() == 1
    assert list(targets.ravel()[scored]) == wanted
    assert list(tokens.ravel()[scored]) == [0, *wanted[:-1]]
    assert not tokens.ravel()[~scored].any() and not targets.ravel()[~scored].any()
    assert scored[: len(wanted)].all()  # the padding is at the end


def test_held_out_windows_have_the_separator_they_are_given():
    documents = [np.array([7, 300], np.uint16), np.array([8], np.uint16)]
    tokens, targets, _ = batches.heldout_windows(documents, separator=70_000, seq_len=4, max_tokens=4)
    assert tokens.tolist() == [[70_000, 7, 300, 70_000]] and targets.tolist() == [[7, 300, 70_000, 8]]


def test_held_out_bytes_are_those_of_the_tokens_that_are_scored():
    token_bytes = [np.array([3, 0, 200], np.uint8), np.array([100], np.uint8)]
    sums = [batches.heldout_bytes(token_bytes, max_tokens=n) for n in range(1, 8)]
    assert sums == [3, 3, 203, 203, 303, 303, 303]
