"""What a run is scored on: the held-out loss, the cloze benchmarks of its corpus, and those of the field."""

import logging
from collections.abc import Callable

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from grlab import parallel
from grlab.data import prepared
from grlab.data.batches import heldout_bytes, heldout_windows
from grlab.data.corpus import Corpus
from grlab.data.tokenizer import Bytes
from grlab.evals import choice, downstream, python_cloze
from grlab.evals.loss import Loss, heldout_loss
from grlab.train.signals import StopSignal

_log = logging.getLogger(__name__)


class Evaluation:
    """The held-out loss and the benchmarks of one corpus, for the parameters it is given.

    What the config asks for and cannot be had is known at once: the benchmarks of the field are read and encoded here.
    """

    def __init__(
        self, config: ConfigDict, corpus: Corpus, mesh: Mesh, nats: Callable, greedy: Callable, stop: StopSignal
    ):
        """`nats` and `greedy` are those of a Trainer."""
        self._config, self._corpus, self._mesh, self._stop = config.eval, corpus, mesh, stop
        self._nats, self._greedy = nats, greedy
        max_tokens = config.eval.tokens
        self._windows = heldout_windows(
            corpus.heldout, separator=corpus.separator, seq_len=config.seq_len, max_tokens=max_tokens
        )
        self._text_bytes = heldout_bytes(corpus.heldout_bytes, max_tokens=max_tokens)
        self._cloze_items = config.eval.cloze_items
        if self._cloze_items and not isinstance(corpus.tokenizer, Bytes):
            self._cloze_items = 0
            _log.warning("the cloze benchmarks are not run: their tokens are bytes, and data.tokenizer is set")
        root, items = prepared.root(config.data.dir), config.eval.downstream_items
        self._downstream = [
            choice.lay_out(benchmark, corpus.tokenizer.encode, seq_len=config.seq_len)
            for benchmark in downstream.load(config.eval.downstream, items=items, root=root)
        ]

    def _on_mesh(self, fn: Callable, params) -> Callable:
        """`fn` of a Trainer as a function of the host's tokens and targets."""

        def of_batch(tokens_BxT, targets_BxT):
            self._stop.check()
            batch = parallel.put_batch({"tokens": tokens_BxT, "targets": targets_BxT}, self._mesh)
            return np.asarray(fn(params, batch["tokens"], batch["targets"]))

        return of_batch

    def loss(self, params) -> Loss:
        """The held-out loss: nats per token, bits per byte, tokens."""
        nats_fn = self._on_mesh(self._nats, params)
        return heldout_loss(nats_fn, *self._windows, batch_size=self._config.batch_size, text_bytes=self._text_bytes)

    def benchmarks(self, params) -> dict[str, choice.Accuracy]:
        """The accuracy on each benchmark, by name; the items are the same for every row and seed."""
        nats_fn, greedy_fn = (self._on_mesh(fn, params) for fn in (self._nats, self._greedy))
        return {
            layout.benchmark.name: choice.score(layout, nats_fn, greedy_fn, batch_size=self._config.batch_size)
            for layout in [*self._cloze(), *self._downstream]
        }

    def _cloze(self) -> list[choice.Layout]:
        if not self._cloze_items:
            return []
        context = self._config.cloze_context
        built = python_cloze.build(self._corpus.heldout, items=self._cloze_items, context=context, seed=0)
        return [choice.lay_out(made, self._corpus.tokenizer.encode, seq_len=context) for made in built.values()]
