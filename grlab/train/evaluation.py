"""What a run is scored on: the held-out loss and the cloze benchmarks of its corpus."""

import logging
from collections.abc import Callable

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from grlab import parallel
from grlab.data.batches import heldout_bytes, heldout_windows
from grlab.data.corpus import Corpus
from grlab.data.tokenizer import Bytes
from grlab.evals import cloze, python_cloze
from grlab.evals.loss import Loss, heldout_loss
from grlab.train.signals import StopSignal

_log = logging.getLogger(__name__)


class Evaluation:
    """The held-out loss and the benchmarks of one corpus, for the parameters it is given."""

    def __init__(self, config: ConfigDict, corpus: Corpus, mesh: Mesh, nats: Callable, stop: StopSignal):
        self._config, self._corpus, self._mesh, self._nats, self._stop = config.eval, corpus, mesh, nats, stop
        max_tokens = config.eval.tokens
        self._windows = heldout_windows(
            corpus.heldout, separator=corpus.separator, seq_len=config.seq_len, max_tokens=max_tokens
        )
        self._text_bytes = heldout_bytes(corpus.heldout_bytes, max_tokens=max_tokens)
        self._cloze_items = config.eval.cloze_items
        if self._cloze_items and not isinstance(corpus.tokenizer, Bytes):
            self._cloze_items = 0
            _log.warning("the cloze benchmarks are not run: their tokens are bytes, and data.tokenizer is set")

    def _nats_fn(self, params):
        def nats_fn(tokens_BxT, targets_BxT):
            self._stop.check()
            batch = parallel.put_batch({"tokens": tokens_BxT, "targets": targets_BxT}, self._mesh)
            return np.asarray(self._nats(params, batch["tokens"], batch["targets"]))

        return nats_fn

    def loss(self, params) -> Loss:
        """The held-out loss: nats per token, bits per byte, tokens."""
        return heldout_loss(
            self._nats_fn(params), *self._windows, batch_size=self._config.batch_size, text_bytes=self._text_bytes
        )

    def benchmarks(self, params) -> dict[str, cloze.Accuracy]:
        """The accuracy on each cloze benchmark; the items are the same for every row and seed."""
        config = self._config
        if not self._cloze_items:
            return {}
        context = config.cloze_context
        built = python_cloze.build(self._corpus.heldout, items=self._cloze_items, context=context, seed=0)
        return cloze.score_all(self._nats_fn(params), built, seq_len=context, batch_size=config.batch_size)
