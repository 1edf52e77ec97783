import math

import numpy as np
import pytest

from grlab import errors
from grlab.evals import loss as losses
from grlab.evals.loss import nats_in_batches


def heldout_loss(*args, text_bytes=10):
    return losses.heldout_loss(*args, text_bytes=text_bytes)


def corpus(rows=7, length=5, seed=0):
    rng = np.random.default_rng(seed)
    tokens_NxT = rng.integers(0, 4, (rows, length))
    targets_NxT = rng.integers(0, 4, (rows, length))
    weights_NxT = rng.integers(0, 2, (rows, length)).astype(np.float32)
    return tokens_NxT, targets_NxT, weights_NxT


def nats_fn(tokens_BxT, targets_BxT):
    return (1 + np.sqrt(3 * tokens_BxT + targets_BxT)).astype(np.float32)


def test_mean_is_weighted_by_token_and_bits_are_over_bytes_of_text():
    tokens_NxT, targets_NxT, weights_NxT = corpus()
    nats = np.sum(nats_fn(tokens_NxT, targets_NxT).astype(np.float64) * weights_NxT)
    text_bytes = int(np.sum(weights_NxT * (targets_NxT != 0)))
    loss = heldout_loss(nats_fn, tokens_NxT, targets_NxT, weights_NxT, 3, text_bytes=text_bytes)
    assert 0 < text_bytes < weights_NxT.sum()
    assert loss.tokens == weights_NxT.sum()
    assert loss.nats_per_token == pytest.approx(nats / weights_NxT.sum(), rel=1e-14)
    assert loss.bits_per_byte == pytest.approx(nats / text_bytes / math.log(2), rel=1e-14)


def test_a_byte_guessed_evenly_costs_eight_bits():
    tokens_NxT = np.full((3, 4), 65)
    loss = heldout_loss(
        lambda tokens, targets: np.full(tokens.shape, math.log(256)),
        tokens_NxT,
        tokens_NxT,
        np.ones((3, 4)),
        2,
        text_bytes=12,
    )
    assert loss.bits_per_byte == pytest.approx(8)
    assert loss.nats_per_token == pytest.approx(math.log(256))


def test_batch_size_changes_nothing_at_all():
    tokens_NxT, targets_NxT, weights_NxT = corpus(rows=23, length=97)
    losses = {heldout_loss(nats_fn, tokens_NxT, targets_NxT, weights_NxT, size) for size in (1, 2, 7, 23, 64)}
    assert len(losses) == 1


def test_one_shape_reaches_the_model_and_its_answers_to_filling_are_dropped():
    shapes = set()

    def watched(tokens_BxT, targets_BxT):
        shapes.add((tokens_BxT.shape, tokens_BxT.dtype, targets_BxT.shape, targets_BxT.dtype))
        nats_BxT = nats_fn(tokens_BxT, targets_BxT)
        nats_BxT[~tokens_BxT.any(1)] = np.nan  # rows of zeros
        return nats_BxT

    tokens_NxT, targets_NxT, weights_NxT = corpus()
    tokens_NxT[:, 0] = 1
    loss = heldout_loss(watched, tokens_NxT, targets_NxT, weights_NxT, 4)
    assert shapes == {((4, 5), np.dtype(np.int32)) * 2}
    assert loss == heldout_loss(nats_fn, tokens_NxT, targets_NxT, weights_NxT, 7)
    starts = [(start, len(nats_bxT)) for start, nats_bxT in nats_in_batches(watched, tokens_NxT, targets_NxT, 4)]
    assert starts == [(0, 4), (4, 3)]


def test_a_target_of_no_weight_is_not_looked_at_and_others_are():
    tokens_NxT, targets_NxT, weights_NxT = corpus()
    unweighted = lambda tokens, targets: np.where(weights_NxT == 0, np.nan, nats_fn(tokens, targets))  # noqa: E731
    expected = heldout_loss(nats_fn, tokens_NxT, targets_NxT, weights_NxT, 7)
    assert heldout_loss(unweighted, tokens_NxT, targets_NxT, weights_NxT, 7) == expected
    weighted = lambda tokens, targets: np.where(weights_NxT == 1, np.nan, nats_fn(tokens, targets))  # noqa: E731
    assert math.isnan(heldout_loss(weighted, tokens_NxT, targets_NxT, weights_NxT, 7).nats_per_token)


def test_sum_is_not_rounded_to_float32():
    # In float32 a total of 2**24 swallows ones.
    nats_1xT = np.ones((1, 1001), np.float32)
    nats_1xT[0, 0] = 2**24
    ones_1xT = np.ones_like(nats_1xT)
    loss = heldout_loss(lambda tokens, targets: nats_1xT, ones_1xT, ones_1xT, ones_1xT, 1)
    assert loss.nats_per_token == (2**24 + 1000) / 1001


def test_wrong_shapes_are_refused():
    tokens_NxT, targets_NxT, weights_NxT = corpus()
    with pytest.raises(ValueError, match="differ"):
        heldout_loss(nats_fn, tokens_NxT, targets_NxT[:, :-1], weights_NxT, 2)
    with pytest.raises(ValueError, match="differ"):
        heldout_loss(nats_fn, tokens_NxT, targets_NxT, weights_NxT[:1], 2)
    with pytest.raises(ValueError, match="nats_fn gave"):
        heldout_loss(lambda tokens, targets: nats_fn(tokens, targets).mean(1), tokens_NxT, targets_NxT, weights_NxT, 2)
    with pytest.raises(errors.UsageError, match="batch_size"):
        heldout_loss(nats_fn, tokens_NxT, targets_NxT, weights_NxT, 0)


def test_nothing_to_score_is_an_error():
    tokens_NxT, targets_NxT, weights_NxT = corpus()
    with pytest.raises(errors.UsageError, match="held-out"):
        heldout_loss(nats_fn, tokens_NxT, targets_NxT, 0 * weights_NxT, 2)
    with pytest.raises(errors.UsageError, match="held-out"):
        heldout_loss(nats_fn, tokens_NxT, targets_NxT, weights_NxT, 2, text_bytes=0)
