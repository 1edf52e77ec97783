"""The input pipeline alone: tokens a second from the prepared corpus to arrays on the devices."""

import statistics
import time

import jax
from ml_collections import ConfigDict

from grlab import parallel
from grlab.data import batches as data
from grlab.data import corpus as corpora

BATCHES = 200  # of a round


def measure(config: ConfigDict, rounds: int) -> float:
    """The median over the rounds of the tokens a second, read as a run reads them."""
    corpus, mesh = corpora.load(config.data), parallel.make_mesh(config.mesh)
    share = parallel.share_of(config.batch_size, mesh)
    sizes = {"seq_len": config.seq_len, "batch_size": config.batch_size}
    iterator = data.iterate(data.train_batches(corpus.train, **sizes, seed=config.seed, rows=share.rows), 0)
    jax.block_until_ready(parallel.put_batch(next(iterator), mesh, share))
    speeds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(BATCHES):
            jax.block_until_ready(parallel.put_batch(next(iterator), mesh, share))
        speeds.append(BATCHES * config.batch_size * config.seq_len / (time.perf_counter() - start))
    return statistics.median(speeds)
