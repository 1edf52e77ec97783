"""Attention Residuals, arXiv 2603.15031: x = norm(Σ_i softmax_i(q · RMSNorm(source_i)) source_i).

The sources of sublayer k are the embedding and the outputs before it, summed in blocks of S: the finished blocks' sums,
and the sum of what the current block has so far, if it has anything. The statement keeps them in a list; in the array
their slots are in the order of the blocks, the embedding first.
"""

import numpy as np

from tests.residual import starts
from tests.residual.statements import norm, normalise, softmax

LAYERS = 3
CASES = [{}, {"block": 2}, {"block": 4}, {"block": 2, "gated_norm": 3}]
SITES = (1, 2, 5)


def attend(p, sources, eps):
    """The read of a list of sources."""
    logits = np.stack([(normalise(s, eps) * (1 + p["source_gain"])) @ p["q"] for s in sources])
    weights = softmax(logits, axis=0)
    return norm(p, sum(w[..., None] * s for w, s in zip(weights, sources, strict=True)), eps)


def sources_of(stream, k, block):
    """The embedding, the finished blocks and the one that has begun, as a list."""
    finished, begun = divmod(k, block)
    return [stream[:, :, i] for i in range(1 + finished + (begun > 0))]


def part(p, prefix):
    return {name.removeprefix(prefix): v for name, v in p.items() if name.startswith(prefix)}


def site(p, stream, y, *, k, eps, block=1, **switches):
    new = stream.copy()
    new[:, :, 1 + k // block] += y
    return attend(part(p, "attend."), sources_of(stream, k, block), eps), new


def collapse(p, stream, *, eps, block=1, **switches):
    return attend(part(p, "final."), sources_of(stream, 2 * LAYERS, block), eps)


def expand(x, *, block=1, **switches):
    return np.stack([x] + [np.zeros_like(x)] * -(-2 * LAYERS // block), axis=-2)


def start(model, tokens):
    """Zero queries: every read is the mean of its sources."""
    block = model.residual.switches.block
    sources, begun = [starts.embed(model, tokens)], []

    def mean():
        there = [*sources, sum(begun)] if begun else sources
        return starts.norm(sum(there) / len(there))

    for sublayer in starts.sublayers(model):
        begun.append(sublayer(mean()))
        if len(begun) == block:
            sources.append(sum(begun))
            begun.clear()
    return mean() @ model.head[...], starts.EXACT
