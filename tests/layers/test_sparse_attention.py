"""Sparse attention against a float64 statement that goes query by query, and against attention.

Seen to fail: no ReLU, no 1/√E; a block's key from its first token, or turned by its last place, or of normed keys; the
query that completes a block not seeing it scored, or seeing it whole whether it is chosen or not; a block more than the
budget has; the lowest scores; of ties the later; blocks counted from the start of the sequence; blocks or tails of
other documents; no room for a block in a short sequence. Of the indexer's loss: its input or its teacher not detached;
the teacher pooled by the mean, pooled before the sum over heads, or not made to sum to 1; all blocks and not the chosen
ones; the divergence the other way round; a query left out of the mean. Of pieces: queries shifted, their places counted
anew.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grlab.layers import sparse_attention
from grlab.layers.attention import Attention, turned
from grlab.layers.sparse_attention import SparseAttention
from tests.layers import modules, statements
from tests.residual.functional import error, parameters, with_parameters
from tests.residual.statements import normalise, softmax

R, BUDGET = 3, 6
# eps is larger than in use, so that one that is out of place is seen.
SMALL = ("model.width=4", "model.heads=4", "model.kv_heads=2", "model.head_dim=4", "model.norm_eps=1e-2")
SMALL = (*SMALL, f"model.qsa.block={R}", f"model.qsa.budget={BUDGET}", "model.qsa.heads=2", "model.qsa.head_dim=6")


def stated(p, x_BxTxD, config, lengths):
    """(y, the loss of the indexer): queries in turn, each of which lists what it looks at."""
    qsa = config.qsa
    of = {"theta": config.rope_theta, "turned": turned(config), "eps": config.norm_eps}
    y, losses = [], []
    for x_TxD, of_sequence in zip(x_BxTxD, lengths, strict=True):
        q, k, v = statements.attention_heads(p, x_TxD, **of)
        starts = np.repeat(np.cumsum([0, *of_sequence[:-1]]), of_sequence)
        index_q = np.einsum("td,die->tie", x_TxD, p["indexer.query"])
        index_q = normalise(index_q, of["eps"]) * (1 + p["indexer.query_gain"])
        index_q = statements.rope(index_q, of["theta"], of["turned"], np.arange(len(x_TxD)))
        index_k = x_TxD @ p["indexer.key"]
        out = []
        for i, start in enumerate(starts):
            visible = np.arange(start, i + 1)
            complete = len(visible) // qsa.block
            blocks = visible[: complete * qsa.block].reshape(complete, qsa.block)
            scores = []
            for block in blocks:
                key = normalise(index_k[block].mean(axis=0), of["eps"]) * (1 + p["indexer.key_gain"])
                key = statements.rope(key[None, None], of["theta"], of["turned"], block[:1])[0, 0]
                scores.append(np.sum(np.maximum(index_q[i] @ key, 0)) / np.sqrt(qsa.head_dim))
            best = sorted(range(complete), key=lambda block: -scores[block])[: qsa.budget // qsa.block]
            seen = np.concatenate([*blocks[best], visible[complete * qsa.block :]]).astype(int)
            of_heads, weights = statements.attend(q[i], k, v, seen)
            out.append(of_heads)
            if best:  # their tokens are the first of `seen`
                teacher = weights.sum(axis=0)[: len(best) * qsa.block].reshape(len(best), qsa.block).max(axis=1)
                teacher = teacher / teacher.sum()
                student = softmax(np.array([scores[block] for block in best]))
                losses.append(np.sum(teacher * np.log(teacher / student)))
            else:
                losses.append(0.0)
        y.append(statements.attention_output(p, x_TxD, np.stack(out)))
    return np.stack(y), np.mean(losses)


LAYOUTS = {
    "one text": [[23], [23]],
    "documents": [[13, 10], [9, 1, 11, 2]],
    "documents of blocks": [[3, 12, 6, 2], [6, 3, 3, 3, 8]],
    "documents of one token": [[1, 1, 20, 1], [1] * 23],
    "shorter than a block": [[2], [2]],
    "one token": [[1], [1]],
    "a block": [[3], [3]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values(layout):
    lengths = LAYOUTS[layout]
    module, config = modules.build(SparseAttention, *SMALL)
    x_BxTxD = modules.draw(2, sum(lengths[0]), 4)
    documents_BxT = None if len(lengths[0]) == 1 else modules.documents(*lengths)
    y, statistics = jax.jit(module)(x_BxTxD, documents_BxT)
    p = {name: np.asarray(v, np.float64) for name, v in parameters(module).items()}
    wanted, loss = stated(p, x_BxTxD.astype(np.float64), config, lengths)
    assert error(y, wanted) < 1e-6
    assert abs(float(statistics["index_kl"]) - loss) < 1e-6


def test_of_equal_scores_the_earlier_blocks_are_chosen():
    module, config = modules.build(SparseAttention, *SMALL)
    module.indexer.query[...] = jnp.zeros_like(module.indexer.query[...])
    x_BxTxD = modules.draw(1, 23, 4)
    p = {name: np.asarray(v, np.float64) for name, v in parameters(module).items()}
    assert error(jax.jit(module)(x_BxTxD)[0], stated(p, x_BxTxD.astype(np.float64), config, [[23]])[0]) < 1e-6


@pytest.mark.parametrize("what", ["y", "index_kl"])
@pytest.mark.parametrize("lengths", [[17], [13, 4]], ids=["one text", "documents"])
def test_gradients(lengths, what):
    """Those of y are attention's, and none the indexer's; those of the indexer's loss are the indexer's alone."""
    module, config = modules.build(SparseAttention, *SMALL)
    documents_BxT = modules.documents(lengths)
    of_indexer = [name for name in parameters(module) if name.startswith("indexer.")]
    others = ["x", *(name for name in parameters(module) if name not in of_indexer)]

    def run(module, x_BxTxD):
        y, statistics = module(x_BxTxD, documents_BxT)
        return y if what == "y" else statistics["index_kl"]

    def wanted(p, x_BxTxD):
        return stated(p, x_BxTxD, config, [lengths])[what != "y"]

    x_BxTxD, constant = modules.draw(1, 17, 4), of_indexer if what == "y" else others
    modules.check_against(wanted, run, module, x_BxTxD, constant=constant)


@pytest.mark.parametrize("documents", [False, True])
def test_is_attention_while_the_budget_covers_what_a_query_sees(documents):
    """That is up to budget + block − 1 tokens, of which the last block is never complete; then it is not."""
    module, config = modules.build(SparseAttention, *SMALL)
    covered = BUDGET + R - 1
    lengths = [covered + 1, covered + 2, covered] if documents else [covered + 1]
    of_attention = {name: v for name, v in parameters(module).items() if not name.startswith("indexer.")}
    attention = with_parameters(modules.build(Attention, *SMALL)[0], of_attention)
    x_BxTxD, documents_BxT = modules.draw(1, sum(lengths), 4), modules.documents(lengths)
    documents_BxT = documents_BxT if documents else None
    sparse, dense = (np.asarray(jax.jit(f)(x_BxTxD, documents_BxT)[0][0]) for f in (module, attention))
    place_T = np.concatenate([np.arange(length) for length in lengths])
    difference_T = np.abs(sparse - dense).max(axis=1)
    np.testing.assert_array_less(difference_T[place_T < covered], 1e-6)
    np.testing.assert_array_less(1e-3, difference_T[place_T >= covered])


@pytest.mark.parametrize("piece", [1, 4, 8])
def test_pieces_are_one_function(piece, monkeypatch):
    """Queries worked on a piece at a time, the last one short: the same values and gradients."""
    module, _ = modules.build(SparseAttention, *SMALL)
    x_BxTxD, documents_BxT = modules.draw(2, 21, 4), modules.documents([17, 4], [2, 19])
    cotangent = modules.draw(2, 21, 4, seed=1)

    def loss(p, x_BxTxD):
        y, statistics = with_parameters(module, p)(x_BxTxD, documents_BxT)
        return jnp.sum(y * cotangent) + statistics["index_kl"], y

    def run():
        gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (value, y), (of_parameters, of_x) = jax.jit(gradient)(parameters(module), x_BxTxD)
        return {"loss": value, "y": y, "x": of_x} | of_parameters

    whole = run()
    monkeypatch.setattr(sparse_attention, "PIECE", piece)
    pieces = run()
    errors = {name: error(pieces[name], whole[name]) for name in whole}
    assert max(errors.values()) < 2e-6, errors
