"""Attention against a float64 statement that goes query by query; partial RoPE, the output gate, documents.

Seen to fail: pairs of neighbouring channels; frequencies over the whole head; the turn of the other sign, or of one of
a pair; all channels turned; a gate without σ, or SiLU; no 1/√C; a gain left out, another eps; documents or causality
ignored; positions that are given ignored.
"""

import jax
import numpy as np
import pytest

from grlab.layers.attention import Attention, rope, turned
from tests.layers import modules, statements
from tests.residual.functional import error

# eps is larger than in use, so that one that is out of place is seen.
SMALL = ("model.width=5", "model.heads=4", "model.kv_heads=2", "model.head_dim=4", "model.norm_eps=1e-2")
PLAIN = ("model.output_gate=false", "model.rope_fraction=1.0")
LENGTHS = [4, 1, 4], [1, 1, 1, 4, 1, 1]


@pytest.mark.parametrize("switches", [(), PLAIN], ids=["gated, half of the channels turned", "plain"])
@pytest.mark.parametrize("documents_BxT", [None, modules.documents(*LENGTHS)], ids=["one text", "documents"])
def test_values_and_gradients(switches, documents_BxT):
    module, config = modules.build(Attention, *SMALL, *switches)
    of = {"theta": config.rope_theta, "turned": turned(config), "eps": config.norm_eps}
    assert of["turned"] == (4 if switches else 2) and hasattr(module, "output_gate") != bool(switches)

    def stated(p, x_BxTxD):
        found = []
        for b, x_TxD in enumerate(x_BxTxD):
            q, k, v = statements.attention_heads(p, x_TxD, **of)
            document = np.zeros(len(x_TxD)) if documents_BxT is None else documents_BxT[b]
            seen = [[s for s in range(t + 1) if document[s] == document[t]] for t in range(len(x_TxD))]
            out = [statements.attend(q[t], k, v, seen[t])[0] for t in range(len(x_TxD))]
            found.append(statements.attention_output(p, x_TxD, np.stack(out)))
        return np.stack(found)

    x_BxTxD = modules.draw(2, 9, 5)
    modules.check_against(stated, lambda m, x: m(x, documents_BxT)[0], module, x_BxTxD)


def test_tokens_see_their_own_document_alone():
    """Though a document's first token is at another position than when it is by itself: positions are relative."""
    module, _ = modules.build(Attention)
    x_BxTxD = modules.draw(2, 9, 16)
    packed = jax.jit(module)(x_BxTxD, modules.documents(*LENGTHS))[0]
    alone = jax.jit(lambda x_BxTxD: module(x_BxTxD)[0])
    assert error(packed, modules.by_documents(alone, x_BxTxD, *LENGTHS)) < 1e-6


@pytest.mark.parametrize("turned", [8, 4, 2])
def test_rope_is_of_relative_positions(turned):
    """The products of queries and keys stay as they are where all positions move; the other channels stay themselves.

    At position 100 an angle is within 4e-6 of what it should be in float32.
    """
    q, k = modules.draw(1, 6, 2, 8), modules.draw(1, 6, 2, 8, seed=1)
    position_BxT = np.array([[0, 1, 2, 5, 9, 40]])

    def products(shift):
        q_, k_ = (rope(x, 100.0, turned, position_BxT + shift) for x in (q, k))
        np.testing.assert_array_equal(q_[..., turned:], q[..., turned:])
        return np.einsum("bqhc,bkhc->bhqk", q_, k_)

    assert error(products(60), products(0)) < 1e-5
    assert error(np.einsum("bqhc,bkhc->bhqk", q, k), products(0)) > 0.1
    np.testing.assert_allclose(rope(q, 100.0, turned), rope(q, 100.0, turned, np.arange(6)[None]), atol=1e-6)


@pytest.mark.parametrize("turned", [8, 4, 2])
def test_rope_against_its_statement(turned):
    x = modules.draw(1, 6, 2, 8)
    position_T = np.array([0, 1, 2, 5, 9, 40])
    wanted = statements.rope(x[0].astype(np.float64), 1e7, turned, position_T)
    assert error(jax.jit(lambda x: rope(x, 1e7, turned, position_T[None]))(x)[0], wanted) < 5e-6
