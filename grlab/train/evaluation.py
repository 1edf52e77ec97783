"""What a run is scored on: the held-out loss and the cloze benchmarks of its corpus."""

from collections.abc import Callable

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from grlab import parallel
from grlab.data.batches import heldout_windows
from grlab.data.corpus import Corpus
from grlab.evals import cloze, python_cloze
from grlab.evals.loss import Loss, heldout_loss
from grlab.train.signals import StopSignal


class Evaluation:
    """The held-out loss and the benchmarks of one corpus, for the parameters it is given."""

    def __init__(self, config: ConfigDict, corpus: Corpus, mesh: Mesh, nats: Callable, stop: StopSignal):
        self._config, self._corpus, self._mesh, self._nats, self._stop = config.eval, corpus, mesh, nats, stop
        self._windows = heldout_windows(corpus.heldout, seq_len=config.seq_len, max_tokens=config.eval.tokens)

    def _nats_fn(self, params):
        def nats_fn(tokens_BxT, targets_BxT):
            self._stop.check()
            batch = parallel.put_batch({"tokens": tokens_BxT, "targets": targets_BxT}, self._mesh)
            return np.asarray(self._nats(params, batch["tokens"], batch["targets"]))

        return nats_fn

    def loss(self, params) -> Loss:
        """The held-out loss: nats per token, bits per byte, tokens."""
        return heldout_loss(self._nats_fn(params), *self._windows, batch_size=self._config.batch_size)

    def benchmarks(self, params) -> dict[str, cloze.Accuracy]:
        """The accuracy on each cloze benchmark; the items are the same for every row and seed."""
        config = self._config
        if not config.cloze_items:
            return {}
        context = config.cloze_context
        built = python_cloze.build(self._corpus.heldout, items=config.cloze_items, context=context, seed=0)
        return cloze.score_all(self._nats_fn(params), built, seq_len=context, batch_size=config.batch_size)
