"""The gated delta rule, by chunks and token by token, against float64 NumPy: values and the gradients of all inputs.

The statement knows no chunks and no documents: it runs each document by itself, forwards and, by hand, backwards.
Error is max|a - b| / max|b| of an array.

Seen to fail: sums of g in one part (`test_extremes` alone); the inverse as the product of I + (−A)^(2^i) (the same);
no β or no decay where they belong; a token that does not see its own write; the inverse's gradient not transposed, of
the other sign, or with an upper triangle; a corner without one of its blocks; the gradient of g left out, or that on
the way to the state. Of documents: the state, the writes into it, or writes within a chunk kept over a boundary; the
state taken for that of the first token of the chunk before.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grlab.ops.delta_rule import chunked, recurrent, unit_lower_inverse
from tests.residual.functional import compiled, error
from tests.residual.statements import finite_differences

H, G, K, V = 2, 3, 5, 4
TOLERANCE = 5e-6  # measured: 2e-6 with keys that are all the same, else 9e-7


def stated(q_TxHxK, k_TxHxK, v_TxHxGxV, g_TxHxG, beta_TxHxG, cotangent_TxHxGxV):
    """One document: S_t = α S_{t−1} + k (β (v − (α S_{t−1})ᵀ k))ᵀ, o = Sᵀ q.

    Gives o, the gradients of Σ o · cotangent, and the sum of the magnitudes that the gradient of g is the sum of.
    """
    inputs = (q_TxHxK, k_TxHxK, v_TxHxGxV, g_TxHxG, beta_TxHxG)
    o, dq, dk, dv, dg, dbeta, size_of_dg = (np.zeros(x.shape) for x in (v_TxHxGxV, *inputs, g_TxHxG))
    for h, i in itertools.product(range(H), range(G)):
        s, kept = np.zeros((K, V)), []
        for t in range(len(o)):
            q, k, v, beta = q_TxHxK[t, h], k_TxHxK[t, h], v_TxHxGxV[t, h, i], beta_TxHxG[t, h, i]
            decayed = np.exp(g_TxHxG[t, h, i]) * s
            wrong = v - decayed.T @ k
            s = decayed + np.outer(k, beta * wrong)
            o[t, h, i] = s.T @ q
            kept.append((decayed, wrong, s))
        ds = np.zeros((K, V))
        for t in reversed(range(len(o))):
            q, k, beta, do = q_TxHxK[t, h], k_TxHxK[t, h], beta_TxHxG[t, h, i], cotangent_TxHxGxV[t, h, i]
            decayed, wrong, s = kept[t]
            dq[t, h] += s @ do
            ds = ds + np.outer(q, do)
            dv[t, h, i] = beta * (ds.T @ k)
            dbeta[t, h, i] = wrong @ (ds.T @ k)
            dk[t, h] += ds @ (beta * wrong) - decayed @ dv[t, h, i]
            ds = ds - np.outer(k, dv[t, h, i])
            dg[t, h, i], size_of_dg[t, h, i] = np.sum(ds * decayed), np.sum(np.abs(ds * decayed))
            ds = np.exp(g_TxHxG[t, h, i]) * ds
    return o, dq, dk, dv, dg, dbeta, size_of_dg


def stated_by_documents(inputs, cotangent, lengths):
    """The same of a batch; `lengths` are those of the documents of each sequence."""
    arrays = [np.asarray(x, np.float64) for x in (*inputs, cotangent)]
    found = [np.zeros(x.shape) for x in (arrays[2], *arrays[:5], arrays[3])]
    for b, of_sequence in enumerate(lengths):
        ends = np.cumsum(of_sequence)
        for start, end in zip(ends - of_sequence, ends, strict=True):
            for whole, part in zip(found, stated(*(x[b, start:end] for x in arrays)), strict=True):
                whole[b, start:end] = part
    return found


def draw(batch, length, seed=0):
    """(q, k, v, g, beta) as the layer makes them, and a cotangent, float32."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((batch, length, H, K)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, cotangent = (rng.standard_normal((batch, length, H, G, V)) for _ in range(2))
    g, beta = -np.exp(rng.standard_normal((batch, length, H, G)) - 1), rng.random((batch, length, H, G))
    return [x.astype(np.float32) for x in (q, k, v, g, beta)], cotangent.astype(np.float32)


def value_and_gradients(rule, inputs, cotangent, documents_BxT=None):
    """[o, dq, dk, dv, dg, dbeta] as ours."""

    def run(inputs):
        out, vjp = jax.vjp(lambda *inputs: rule(*inputs, documents_BxT), *inputs)
        return [out, *vjp(cotangent)]

    return compiled(run)(inputs)


def check(ours, wanted):
    """The error of each is at most 5e-6 of its largest value; of g's gradient, of the sums that it is left of.

    Everything is of order 1, so what is smaller is held against 1: a decay to nothing has no gradient.
    """
    *wanted, size_of_dg = wanted
    errors = {}
    for name, a, b in zip(("o", "q", "k", "v", "g", "beta"), ours, wanted, strict=True):
        assert a.shape == b.shape
        largest = max(1, np.abs(size_of_dg if name == "g" else b).max())
        errors[name] = float(np.abs(np.asarray(a, np.float64) - b).max() / largest)
    assert max(errors.values()) < TOLERANCE, errors


@functools.cache
def of_length(length):
    inputs, cotangent = draw(1, length)
    return inputs, cotangent, stated_by_documents(inputs, cotangent, [[length]])


@pytest.mark.parametrize("length", [1, 5, 150])
def test_recurrent(length):
    inputs, cotangent, wanted = of_length(length)
    check(value_and_gradients(recurrent, inputs, cotangent), wanted)


CASES = {8: (5, 65), 16: (1, 63, 150), 64: (64, 65, 150)}


@pytest.mark.parametrize("chunk, length", [(chunk, length) for chunk, of in CASES.items() for length in of])
def test_chunked(chunk, length):
    inputs, cotangent, wanted = of_length(length)
    check(value_and_gradients(functools.partial(chunked, chunk=chunk), inputs, cotangent), wanted)


RULES = {"recurrent": recurrent, "chunks of 8": functools.partial(chunked, chunk=8), "a chunk of 64": chunked}
# The documents of sequences of 37 tokens, and where they begin in chunks of 8.
LAYOUTS = {
    "inside chunks": [13, 15, 9],
    "at chunk edges": [8, 16, 8, 5],
    "next to chunk edges": [7, 8, 10, 7, 5],
    "several in a chunk": [2, 3, 2, 3, 12, 15],
    "documents of one token": [1, 1, 5, 1, 1, 7, 1, 20],
    "documents of one token alone": [1] * 37,
}


@pytest.mark.parametrize("rule", RULES)
def test_documents_know_nothing_of_each_other(rule):
    """Packed, each document's outputs and gradients are those of the document by itself."""
    documents_BxT = np.stack([np.repeat(np.arange(len(of)), of) for of in LAYOUTS.values()])
    inputs, cotangent = draw(*documents_BxT.shape)
    ours = value_and_gradients(RULES[rule], inputs, cotangent, documents_BxT)
    wanted = stated_by_documents(inputs, cotangent, LAYOUTS.values())
    for b in range(len(LAYOUTS)):
        check([x[b] for x in ours], [x[b] for x in wanted])


@pytest.mark.parametrize("rule", ["recurrent", "a chunk of 64"])
def test_extremes(rule):
    """No decay, strong decay, hardly any after strong ones, and keys that are all the same.

    Differences of sums of g have no digits left where 32 tokens of g = −50 lie before those of −0.01: 4e-5 instead of
    2e-7. With identical keys written whole, A is ones below the diagonal: its powers reach 1e18, its inverse is made of
    0, 1 and −1.
    """
    inputs, cotangent = draw(4, 128)
    q, k, v, g, beta = inputs
    g[0], g[1], g[3] = 0, -50, 0
    g[2] = np.where(np.arange(128) % 64 < 32, -50, -0.01)[:, None, None]
    k[3], beta[3] = k[3, 0], 1
    ours = value_and_gradients(RULES[rule], inputs, cotangent)
    wanted = stated_by_documents(inputs, cotangent, [[128]] * 4)
    for b in range(4):
        check([x[b] for x in ours], [x[b] for x in wanted])


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 64])
def test_unit_lower_inverse(size):
    a = np.tril(np.random.default_rng(0).standard_normal((3, 2, size, size)), -1) / np.sqrt(size)
    wanted = np.linalg.inv(np.eye(size) + a)
    assert error(compiled(unit_lower_inverse)(a.astype(np.float32)), wanted) < TOLERANCE


@pytest.mark.parametrize("size", [4, 8, 16])
def test_gradient_of_unit_lower_inverse(size):
    rng = np.random.default_rng(0)
    a = np.tril(rng.standard_normal((size, size)), -1).astype(np.float32)
    cotangent = rng.standard_normal((size, size)).astype(np.float32)
    ours = compiled(jax.grad(lambda a: jnp.sum(cotangent * unit_lower_inverse(a))))(a)

    def loss(at):
        return np.sum(cotangent * np.linalg.inv(np.eye(size) + np.tril(at["a"], -1)))

    wanted = finite_differences(loss, {"a": a.astype(np.float64)})["a"]
    assert error(ours, wanted) < TOLERANCE
