"""Held-out loss: the exact mean over the scored tokens, whatever the batch size."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from grlab import errors

# nats_fn(tokens_BxT int32, targets_BxT int32) -> [B, T]: the negative log-likelihood of each target, in nats.
NatsFn = Callable[[np.ndarray, np.ndarray], np.ndarray]
# greedy_fn(tokens_BxT int32, targets_BxT int32) -> bool [B, T]: whether the target is the model's first choice.
GreedyFn = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Loss(NamedTuple):
    """nats_per_token: the weighted mean; bits_per_byte: the same total over the bytes of text, in bits (so that
    tokenizers compare); tokens: the sum of the weights."""

    nats_per_token: float
    bits_per_byte: float
    tokens: float


def heldout_loss(
    nats_fn: NatsFn,
    tokens_NxT: np.ndarray,
    targets_NxT: np.ndarray,
    weights_NxT: np.ndarray,
    batch_size: int,
    text_bytes: float,
) -> Loss:
    """The weighted mean of nats over all N x T targets; a target of weight 0 is not looked at, were it NaN.

    `text_bytes` is how many bytes of text the weighted targets stand for (`batches.heldout_bytes`). A separator stands
    for none, and its nats stay in the total: a model pays for saying where a document ends. The sum is exactly rounded
    (`math.fsum`), so the value depends on `batch_size` only as far as `nats_fn` itself does. ValueError on shapes that
    do not agree; UsageError when nothing is to be scored.
    """
    if not tokens_NxT.shape == targets_NxT.shape == weights_NxT.shape:
        raise ValueError(f"tokens {tokens_NxT.shape}, targets {targets_NxT.shape}, weights {weights_NxT.shape} differ")
    weights_NxT = np.asarray(weights_NxT, np.float64)
    tokens = math.fsum(weights_NxT.flat)
    if not (tokens > 0 and text_bytes > 0):
        raise errors.UsageError("eval.tokens", tokens, "no held-out text to score: hold out more (data.heldout)")

    row_nats = []
    for start, nats_bxT in nats_in_batches(nats_fn, tokens_NxT, targets_NxT, batch_size):
        weights_bxT = weights_NxT[start : start + len(nats_bxT)]
        weighted_bxT = np.where(weights_bxT == 0, 0.0, nats_bxT) * weights_bxT
        row_nats += [math.fsum(row_T) for row_T in weighted_bxT]
    nats = math.fsum(row_nats)
    return Loss(nats / tokens, nats / text_bytes / math.log(2), tokens)


def nats_in_batches(
    nats_fn: NatsFn, tokens_NxT: np.ndarray, targets_NxT: np.ndarray, batch_size: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, nats [b, T] float64) in row order, b <= batch_size.

    `nats_fn` sees one shape, [batch_size, T], and so compiles once: the last batch is filled up with rows of zeros
    and the nats of those rows are dropped. ValueError when `nats_fn` answers with another shape.
    """
    errors.positive("eval.batch_size", batch_size)
    for start in range(0, len(tokens_NxT), batch_size):
        rows = min(batch_size, len(tokens_NxT) - start)
        fill = ((0, batch_size - rows), (0, 0))
        tokens_BxT = np.pad(tokens_NxT[start : start + rows], fill).astype(np.int32)
        targets_BxT = np.pad(targets_NxT[start : start + rows], fill).astype(np.int32)
        nats_BxT = np.asarray(nats_fn(tokens_BxT, targets_BxT), np.float64)
        if nats_BxT.shape != tokens_BxT.shape:
            raise ValueError(f"nats_fn gave {nats_BxT.shape} for a batch of {tokens_BxT.shape}")
        yield start, nats_BxT[:rows]
