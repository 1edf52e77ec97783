"""Models to score: functions of the tokens and targets that give nats."""

import numpy as np

from grlab.data.tokenizer import Bytes
from grlab.evals import choice

BYTES = Bytes()


def by_row(nats_of_row):
    """A nats_fn that charges `nats_of_row(context and candidate, as bytes)` to the last byte of the row."""

    def nats_fn(tokens_BxT, targets_BxT):
        nats_BxT = np.zeros(tokens_BxT.shape, np.float32)
        for tokens_T, targets_T, nats_T in zip(tokens_BxT, targets_BxT, nats_BxT, strict=True):
            length = len(np.trim_zeros(targets_T, "b"))
            if length:
                nats_T[length - 1] = nats_of_row(bytes([tokens_T[0], *targets_T[:length]]))
        return nats_BxT

    return nats_fn


def uniform(tokens_BxT, targets_BxT):
    return np.ones(tokens_BxT.shape, np.float32)


def noise(tokens_BxT, targets_BxT):
    return np.sin(1.7 * tokens_BxT + 2.3 * targets_BxT).astype(np.float32) + 1


def none_greedy(tokens_BxT, targets_BxT):
    return np.zeros(tokens_BxT.shape, bool)


def score(nats_fn, benchmark, seq_len=256, batch_size=64, greedy_fn=none_greedy, encode=BYTES.encode):
    return choice.score(choice.lay_out(benchmark, encode, seq_len=seq_len), nats_fn, greedy_fn, batch_size=batch_size)
