"""The n-gram embedding: its hashes against Python's integers, the module against a float64 statement.

Seen to fail: a separator's own n-gram that ends at it; n-grams across separators; places with each other's multiplier;
sums for the exclusive or; no carry; the high half of a token lost; a bit too many at once in the remainder; no offsets;
the heads of both sizes in turn; the same primes for each module, squares of primes; the first number of SplitMix64. Of
the module: a gate without its sign, root, floor or 1/√D; a gain left out; a convolution without dilation, norm or SiLU;
hashes or convolutions across documents.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grlab import config as configs
from grlab.layers import ngram
from grlab.layers.ngram import NGramEmbedding, hashed_rows, multipliers, table_rows
from tests.layers import modules
from tests.residual.functional import error, parameters
from tests.residual.statements import normalise, sigmoid, silu

SEPARATOR = 3
WORDS = 2**64


def stated_rows(tokens_T, separator, factors, rows):
    """Of one sequence: [T, W]. From a token backwards until a separator, which with all before it counts as one."""
    heads = len(rows) // (len(factors) - 1)
    found = []
    for t, token in enumerate(tokens_T):
        places, ended, of_token = [token], False, []
        for n in range(2, len(factors) + 1):
            earlier = separator if ended or t < n - 1 else tokens_T[t - n + 1]
            ended = ended or earlier == separator
            places.append(earlier)
            hashed = 0
            for place, factor in zip(places, factors, strict=False):
                hashed ^= int(place) * factor
            for _ in range(heads):
                head = len(of_token)
                of_token.append(sum(rows[:head]) + hashed % rows[head])
        found.append(of_token)
    return np.array(found)


# The smallest and the largest that there are in use: bytes, and Qwen3.8-Flash-Next.
SIZES = {"bytes": (256, 50, 3, 2), "5-grams": (256, 11, 5, 1), "flash_next": (248_320, 20_000_000, 3, 8)}


@functools.cache
def hashes(size, index=0):
    """(the vocabulary, the multipliers, the rows of each head)."""
    vocab, rows, n, heads = SIZES[size]
    config = configs.load("configs/gr.py:flash_next").model.ngram
    config.update(rows=rows, size=n, heads=heads)
    return vocab, multipliers(vocab, n, index, config.seed), table_rows(config, index)


@pytest.mark.parametrize("size", SIZES)
def test_rows_against_integers(size):
    vocab, factors, rows = hashes(size)
    rng = np.random.default_rng(0)
    tokens_BxT = rng.integers(0, vocab, (3, 40), dtype=np.int32)
    tokens_BxT[0, [0, 4, 5, 7, 39]] = SEPARATOR  # the first, two in a row, one between, the last
    tokens_BxT[1, ::3] = vocab - 1
    tokens_BxT[2, 10:20] = 0
    found = jax.jit(lambda tokens_BxT: hashed_rows(tokens_BxT, SEPARATOR, factors, rows))(tokens_BxT)
    wanted = [stated_rows(tokens_T.tolist(), SEPARATOR, factors, rows) for tokens_T in tokens_BxT]
    np.testing.assert_array_equal(found, wanted)
    starts = np.cumsum([0, *rows])
    assert (found >= starts[:-1]).all() and (found < starts[1:]).all()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_sequences_shorter_than_an_ngram(length):
    _, factors, rows = hashes("5-grams")
    tokens_T = np.array([200, 17, 90], np.int32)[:length]
    found = hashed_rows(tokens_T[None], SEPARATOR, factors, rows)
    np.testing.assert_array_equal(found[0], stated_rows(tokens_T.tolist(), SEPARATOR, factors, rows))


def words(values):
    return [jnp.array([value >> shift & 0xFFFFFFFF for value in values], jnp.uint32) for shift in (32, 0)]


def test_times():
    """Products that fit in 64 bits, of random and of extreme numbers."""
    rng = np.random.default_rng(0)
    xs = [0, 1, 2**16 - 1, 2**16, 2**16 + 1, 248_319, 2**31 - 1, *rng.integers(0, 2**31, 50).tolist()]
    factors = [1, 3, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**32 + 1, 2**33 + 1, (2**63 - 1) // 248_320, 2**48 - 1]
    factors += [2**64 - 1, *multipliers(248_320, 3, 0, 1234), *rng.integers(0, 2**33, 10).tolist()]
    for m in factors:
        fitting = [x for x in xs if x * m < WORDS]
        high, low = ngram._times(jnp.array(fitting, jnp.int32), m)
        found = [int(h) << 32 | int(l) for h, l in zip(high, low, strict=True)]
        assert found == [x * m for x in fitting], m


def test_modulo():
    rng = np.random.default_rng(0)
    values = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, WORDS - 1]
    values += [int(v) for v in rng.integers(0, WORDS - 1, 50, dtype=np.uint64)]
    for m in (1, 2, 3, 53, 2**16, 2**16 + 1, 9_973, 20_000_003, 2**30 - 35, 2**30 + 3, 2**31 - 1):
        found = ngram._modulo(*words(values), m)
        assert found.tolist() == [value % m for value in values], m


def test_multipliers():
    """Numbers of SplitMix64, from the second on, made odd and small enough for products below 2⁶³.

    Those of the seed 1234567 stand in its public tests.
    """
    published = [3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    for vocab in (256, 248_320):
        most = (2**63 - 1) // vocab
        found = multipliers(vocab, 4, 0, 1234567)
        assert list(found) == [x % (most // 2) * 2 + 1 for x in published]
        assert all((vocab - 1) * m < 2**63 for m in found)
    assert multipliers(256, 4, 1, 1234567 - 10007) == multipliers(256, 4, 0, 1234567)


@pytest.mark.parametrize("rows", [1, 50, 1_000])
def test_tables_have_distinct_primes(rows):
    """Those of a model's modules are the next primes in order, none left out and none twice."""
    config = configs.load("configs/gr.py:tiny_hybrid").model.ngram
    config.update(rows=rows, size=4, heads=2)
    found = [prime for index in range(3) for prime in table_rows(config, index)]
    sieve = np.ones(2_000, bool)
    sieve[:2] = False
    for divisor in range(2, 45):
        sieve[2 * divisor :: divisor] = False
    assert found == [int(prime) for prime in np.flatnonzero(sieve) if prime >= rows][: 3 * 6]


# Of the module: streams of three channels; two heads for each size of n-gram.
SMALL = ("model.width=3", "model.ngram.width=8", "model.ngram.rows=11", "model.ngram.multiple=8", "model.ngram.conv=3")


def build():
    """(the embedding, its config): the second of a model of 30 tokens and two streams."""

    def of(config, dtype, initial_std, key):
        return NGramEmbedding(config, 30, 2, 1, SEPARATOR, dtype, key)

    return modules.build(of, *SMALL, "model.norm_eps=1e-2")


def stated(p, streams_TxNxD, tokens_T, module, eps):
    """Of one document."""
    size, d = module.size, streams_TxNxD.shape[2]
    rows = stated_rows(tokens_T, SEPARATOR, module.multipliers, module.rows)
    e_TxE = p["table"][rows].reshape(len(rows), -1)
    key_TxNxD = normalise((e_TxE @ p["key"]).reshape(streams_TxNxD.shape), eps) * (1 + p["key_gain"])
    query_TxNxD = normalise(streams_TxNxD, eps) * (1 + p["stream_gain"])
    s_TxN = np.sum(key_TxNxD * query_TxNxD, axis=-1) / np.sqrt(d)
    gate_TxN = sigmoid(np.sign(s_TxN) * np.sqrt(np.abs(s_TxN)))
    u_TxNxD = gate_TxN[..., None] * (e_TxE @ p["value"])[:, None]
    normed_TxNxD = normalise(u_TxNxD, eps) * (1 + p["conv_gain"])
    out_TxNxD = np.zeros_like(u_TxNxD)
    for t in range(len(out_TxNxD)):
        for place, filter_NxD in enumerate(p["conv"]):
            back = size * (len(p["conv"]) - 1 - place)  # the last is the token's own
            if t >= back:
                out_TxNxD[t] += filter_NxD * normed_TxNxD[t - back]
    return u_TxNxD + silu(out_TxNxD)


# A document begins with a separator; the first may have lost it.
TOKENS = np.random.default_rng(0).integers(SEPARATOR + 1, 30, (2, 12), dtype=np.int32)
LENGTHS = [8, 3, 1], [1, 3, 8]
for _tokens_T, _of in zip(TOKENS, LENGTHS, strict=True):
    _tokens_T[np.cumsum(_of)[:-1]] = SEPARATOR


@pytest.mark.parametrize("lengths", [([12], [12]), LENGTHS], ids=["one text", "documents"])
def test_values_and_gradients(lengths):
    module, config = build()
    documents_BxT = None if len(lengths[0]) == 1 else modules.documents(*lengths)

    def of_batch(p, streams_BxTxNxD):
        found = []
        for streams_TxNxD, tokens_T, of in zip(streams_BxTxNxD, TOKENS, lengths, strict=True):
            documents = (np.split(x, np.cumsum(of)[:-1]) for x in (streams_TxNxD, tokens_T))
            parts = [stated(p, *document, module, config.norm_eps) for document in zip(*documents, strict=True)]
            found.append(np.concatenate(parts))
        return np.stack(found)

    modules.check_against(
        of_batch,
        lambda module, streams_BxTxNxD: module(streams_BxTxNxD, TOKENS, documents_BxT),
        module,
        modules.draw(2, 12, 2, 3),
    )


def test_streams_of_zeros():
    """Their gates are one half, where the root has no slope: the gradient is finite."""
    module, config = build()
    streams_BxTxNxD = np.zeros((2, 12, 2, 3))
    y, vjp = jax.vjp(jax.jit(lambda x: module(x, TOKENS)), streams_BxTxNxD.astype(np.float32))
    (gradient,) = vjp(jnp.ones_like(y))
    p = {name: np.asarray(v, np.float64) for name, v in parameters(module).items()}
    documents = zip(streams_BxTxNxD, TOKENS, strict=True)
    assert error(y, np.stack([stated(p, *document, module, config.norm_eps) for document in documents])) < 1e-6
    assert np.isfinite(gradient).all()
