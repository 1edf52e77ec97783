"""Gated DeltaNet against a float64 statement of the whole layer, token by token; documents; causality.

Seen to fail: no bias of the decay, and its other sign; 2β; q not scaled; no eps of the L2 norm, and one outside the
root; a scale of 1 + w; SiLU for the output's gate; the norm over all heads, and another eps; the taps in reverse, one
left out, and taps that look ahead; no SiLU after them; the value heads of a key head interleaved with the others'; the
state or the convolution kept over the boundary of documents.
"""

import jax
import numpy as np
import pytest

from grlab.layers.gated_delta_net import GatedDeltaNet
from tests.layers import modules
from tests.residual.functional import error
from tests.residual.statements import normalise, sigmoid, silu

SMALL = ("model.width=5", "model.gdn.key_heads=2", "model.gdn.value_heads=4")
SMALL = (*SMALL, "model.gdn.key_dim=3", "model.gdn.value_dim=2", "model.gdn.conv=3", "model.gdn.chunk=4")


def stated(p, x_TxD, eps):
    """One document."""
    length = len(x_TxD)

    def convolved(name):
        channels, filters = np.einsum("td,dhc->thc", x_TxD, p[name]), p[f"conv_{name}"]
        taps = len(filters)  # the last is the token's own
        found = np.zeros_like(channels)
        for t in range(length):
            for back in range(min(taps, t + 1)):
                found[t] += filters[taps - 1 - back] * channels[t - back]
        return silu(found)

    q, k = (v / np.sqrt(np.sum(v**2, axis=-1, keepdims=True) + 1e-6) for v in map(convolved, ("query", "key")))
    v, q = convolved("value"), q / np.sqrt(q.shape[-1])
    beta = sigmoid(x_TxD @ p["beta"])
    g = -np.exp(p["decay_log"]) * np.log1p(np.exp(x_TxD @ p["decay"] + p["decay_bias"]))
    value_heads, v_dim = v.shape[1:]
    out = np.zeros_like(v)
    for head in range(value_heads):
        key_head = head // (value_heads // k.shape[1])
        s = np.zeros((k.shape[2], v_dim))
        for t in range(length):
            s = np.exp(g[t, head]) * s
            s = s + np.outer(k[t, key_head], beta[t, head] * (v[t, head] - s.T @ k[t, key_head]))
            out[t, head] = s.T @ q[t, key_head]
    gate = sigmoid(np.einsum("td,dhc->thc", x_TxD, p["output_gate"]))
    return np.einsum("thc,hcd->td", normalise(out, eps) * p["norm_weight"] * gate, p["output"])


def build(*overrides):
    """(the layer, its config), with decays that leave something of a state after some tokens."""
    module, config = modules.build(GatedDeltaNet, *overrides)
    module.decay_log[...] = module.decay_log[...] - 3
    return module, config


@pytest.mark.parametrize("lengths", [([9], [9]), ([3, 1, 5], [6, 1, 1, 1])], ids=["one text", "documents"])
def test_values_and_gradients(lengths):
    """eps is larger than in use, so that one that is out of place is seen."""
    module, config = build(*SMALL, "model.norm_eps=1e-2")
    x_BxTxD = modules.draw(2, 9, 5)
    documents_BxT = None if len(lengths[0]) == 1 else modules.documents(*lengths)

    def of_batch(p, x_BxTxD):
        return modules.by_documents(lambda x_1xTxD: stated(p, x_1xTxD[0], config.norm_eps)[None], x_BxTxD, *lengths)

    modules.check_against(of_batch, lambda m, x: m(x, documents_BxT)[0], module, x_BxTxD)


def test_documents_know_nothing_of_each_other():
    """Boundaries within chunks of 8 and at their edges, and nearer to each other than the convolution is long."""
    module, _ = build()
    lengths = [8, 4, 1, 8], [1, 1, 8, 4, 4, 1, 1, 1]
    x_BxTxD = modules.draw(2, 21, 16)
    run = jax.jit(lambda x_BxTxD, documents_BxT=None: module(x_BxTxD, documents_BxT)[0])
    packed, alone = run(x_BxTxD, modules.documents(*lengths)), modules.by_documents(run, x_BxTxD, *lengths)
    assert error(packed, alone) < 1e-6
    assert error(run(x_BxTxD), alone) > 1e-2


def test_causal():
    """A changed token changes no earlier output, but its own and the later ones of its document."""
    module, _ = build()
    x_BxTxD = modules.draw(1, 21, 16)
    changed = x_BxTxD.copy()
    changed[:, 9] += 1
    run = jax.jit(lambda x_BxTxD: module(x_BxTxD, modules.documents([15, 6]))[0])
    difference_T = np.abs(np.asarray(run(changed) - run(x_BxTxD))).max(axis=(0, 2))
    np.testing.assert_array_less(difference_T[:9], 1e-6)
    np.testing.assert_array_less(1e-3, difference_T[9:15])
    np.testing.assert_array_less(difference_T[15:], 1e-6)
