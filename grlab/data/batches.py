"""Windows of tokens: training batches as a function of (seed, step), and the held-out tokens in order."""

from collections.abc import Iterator, Sequence

import grain
import numpy as np

from grlab.errors import UsageError, positive


class _Windows:
    """Window i is the seq_len + 1 tokens from i * seq_len on: the last is a target here and an input in the next."""

    def __init__(self, tokens: np.ndarray, seq_len: int):
        self._tokens, self._seq_len = tokens, seq_len

    def __len__(self) -> int:
        return max(len(self._tokens) - 1, 0) // self._seq_len

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * self._seq_len
        return self._tokens[start : start + self._seq_len + 1].astype(np.int32)


class _Batches:
    """Batch `step` is the windows step * batch_size + row of `ordered`, of the rows wanted."""

    def __init__(self, ordered: grain.MapDataset, batch_size: int, rows: Sequence[int]):
        self._ordered, self._batch_size, self._rows = ordered, batch_size, rows

    def __len__(self) -> int:
        return len(self._ordered) // self._batch_size

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        first = int(step) * self._batch_size
        window_BxT1 = np.stack([self._ordered[first + int(row)] for row in self._rows])
        return {"tokens_BxT": window_BxT1[:, :-1], "targets_BxT": window_BxT1[:, 1:]}


def train_batches(
    train_tokens: np.ndarray, *, seq_len: int, batch_size: int, seed: int, rows: Sequence[int] | None = None
) -> grain.MapDataset:
    """The training batches: element `step` is {"tokens_BxT", "targets_BxT"}, int32, whatever was read before it.

    With `rows` it is those rows of the batch, and no other window is read. An epoch is all windows in an order drawn
    from the seed and the epoch; epochs follow each other without end, and a batch may lie across two. Raises UsageError
    when the tokens do not fill one batch.
    """
    positive("seq_len", seq_len)
    positive("batch_size", batch_size)
    windows = _Windows(train_tokens, seq_len)
    if len(windows) < batch_size:
        remedy = f"the {len(train_tokens)} training tokens give {len(windows)} windows of seq_len={seq_len}: use fewer"
        raise UsageError("batch_size", batch_size, f"{remedy}, or more text")
    # grain shuffles epoch e by seed + e: hashed first, so that neighbouring seeds do not share orders.
    (seed32,) = np.random.SeedSequence(seed).generate_state(1)
    ordered = grain.MapDataset.source(windows).shuffle(seed=int(seed32)).repeat()
    return grain.MapDataset.source(_Batches(ordered, batch_size, range(batch_size) if rows is None else rows))


def iterate(batches: grain.MapDataset, start_step: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """`batches[start_step]`, `batches[start_step + 1]`, ..., read ahead by threads."""
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)
    return iter(batches[start_step:].to_iter_dataset(options))


def heldout_windows(
    heldout: Sequence[np.ndarray], *, separator: int, seq_len: int, max_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first `max_tokens` held-out tokens as (tokens_NxT int32, targets_NxT int32, weights_NxT float32).

    The documents, each followed by the separator, are the targets; each input is the token before, and the first one a
    separator, so that the first document starts like any other. Every target counts once; the last window is padded
    with weight 0.
    """
    positive("seq_len", seq_len)
    positive("max_tokens", max_tokens)
    stream = np.insert(_first(heldout, separator, max_tokens), 0, separator)
    count = len(stream) - 1
    shape = (-(-count // seq_len), seq_len)
    padding = (0, shape[0] * seq_len - count)
    tokens_NxT = np.pad(stream[:-1], padding).reshape(shape)
    targets_NxT = np.pad(stream[1:], padding).reshape(shape)
    weights_NxT = np.pad(np.ones(count, np.float32), padding).reshape(shape)
    return tokens_NxT, targets_NxT, weights_NxT


def heldout_bytes(token_bytes: Sequence[np.ndarray], *, max_tokens: int) -> int:
    """The bytes of text that the first `max_tokens` held-out tokens stand for; a separator stands for none.

    `token_bytes` is `Corpus.heldout_bytes`.
    """
    return int(_first(token_bytes, 0, max_tokens).sum(dtype=np.int64))


def _first(documents: Sequence[np.ndarray], end: int, max_tokens: int) -> np.ndarray:
    """The first `max_tokens` values of the documents, each followed by `end`, int32."""
    flat, room = [np.zeros(0, np.int32)], max_tokens
    for document in documents:
        if room <= 0:
            break
        flat += [document[:room].astype(np.int32), np.array([end], np.int32)]
        room -= len(document) + 1
    return np.concatenate(flat)[:max_tokens]
