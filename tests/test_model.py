"""The decoder around the residual systems: scan, remat and precision are paths of one function; starts are shared.

Seen to fail: a policy left out of `step` breaks `test_remat_recomputes`; the layer index given to all
layers alike breaks `test_scan_equals_a_loop_of_layers` (home streams differ); a final norm whose eps is not scaled by
n² breaks `test_hc_starts_as_prenorm`; a mask left off breaks `test_causal`;
AttnRes without what it keeps of the current block breaks `test_paths_are_one_function`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from grlab import parallel, residual
from grlab.errors import UsageError
from grlab.layers.ngram import NGramEmbedding
from grlab.model import Context, Decoder, Layer, runs, token_nats
from grlab.ops.remat import periods_of_a_block
from grlab.params import fold
from grlab.train.step import make_trainer
from tests import rows

FLOAT8 = ("residual.stream_dtype=float8_e4m3fn",)
PATHS = [("gr", FLOAT8), ("attnres", ("residual.block=3", "model.layers=4"))]  # with what goes other ways by path


def value_and_grads(model, tokens_BxT):
    graphdef, params = nnx.split(model)

    def loss(params):
        model = nnx.merge(graphdef, params)
        logits_BxTxV, statistics = model.with_statistics(tokens_BxT)
        return jnp.mean(token_nats(logits_BxTxV, tokens_BxT)) + model.auxiliary_loss(statistics)

    return jax.jit(jax.value_and_grad(loss))(params)


def jaxpr_of_gradient(model, tokens_BxT) -> str:
    graphdef, params = nnx.split(model)
    return str(jax.make_jaxpr(jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(tokens_BxT))))(params))


MIXED = [(row, rows.HYBRID) for row in ("prenorm", "gr", "scalars", "attnres")]  # around every kind of layer
# A gradient of a learned scalar is a sum over tokens and channels: one of them cancels here, and leaves rounding.
SMOOTH = [case for case in MIXED if case[0] != "scalars"]


@pytest.mark.parametrize("row, more", [(row, ("model.layers=3",)) for row in rows.ROWS] + MIXED, ids=str)
def test_scan_equals_a_loop_of_layers(row, more):
    """The scan over stacked layers gives what the same layers, built one by one with a plain index, give in turn."""
    config = rows.tiny(row, *more)
    model = rows.decoder(config)
    tokens_BxT = rows.tokens()
    documents_BxT = jnp.cumsum(tokens_BxT == 0, axis=1) if config.model.separate_documents else None
    key = fold(fold(jax.random.key(config.seed), "params"), "layers")
    stream = model.residual.expand(model.embedding[...][tokens_BxT])
    pattern = config.model.pattern.split(",")
    for i in range(config.model.layers):
        ngram = None
        if str(i + 1) == config.model.ngram.layers:
            ngram = lambda k: NGramEmbedding(config.model, 256, model.residual.n_streams, 0, 0, jnp.float32, k)  # noqa: E731
        layer_key = jax.random.fold_in(key, i)
        layer = Layer(config.model, model.residual, pattern[i % len(pattern)], i, layer_key, ngram)
        stream, _ = layer(stream, Context(tokens_BxT, documents_BxT), model.residual)
    logits = model.residual.collapse(stream) @ model.head[...]
    np.testing.assert_allclose(model(tokens_BxT), logits, rtol=2e-5, atol=2e-5)


SETTINGS = ("model.scan=false", *(f"model.remat={remat}" for remat in ("dots", "streams", "full")))


@pytest.mark.parametrize("row, switches", [(row, ()) for row in rows.OF_EACH_KIND] + PATHS + SMOOTH, ids=str)
def test_paths_are_one_function(row, switches):
    """Unrolled, or with each remat policy: the same loss and gradients, with streams apart and maps at work."""
    tokens_BxT = rows.tokens()

    def model(*setting):
        model = rows.decoder(rows.tiny(row, *switches, *setting))
        rows.randomise(model, 0.1)
        return model

    loss, grads = value_and_grads(model(), tokens_BxT)
    for setting in SETTINGS:
        other_loss, other_grads = value_and_grads(model(setting), tokens_BxT)
        np.testing.assert_allclose(other_loss, loss, rtol=1e-6, err_msg=setting)
        for (path, x), (_, y) in zip(nnx.to_flat_state(grads), nnx.to_flat_state(other_grads), strict=True):
            x, y = np.asarray(x.get_value()), np.asarray(y.get_value())
            np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-6 + 1e-5 * np.abs(x).max(), err_msg=f"{setting} {path}")


@pytest.mark.parametrize("row", ["gr", "attnres", "prenorm"])
def test_remat_recomputes(row):
    """The programs differ: with `full` the backward pass runs the layer's forward again, with `dots` less of it."""
    count = {}
    for remat in ("none", "full", "dots"):
        text = jaxpr_of_gradient(rows.decoder(rows.tiny(row, f"model.remat={remat}")), rows.tokens())
        count[remat] = text.count("dot_general"), text.count("logistic")
    assert count["full"][0] > count["dots"][0] >= count["none"][0]
    assert count["dots"][1] > count["none"][1]


@pytest.mark.parametrize("row", ["gr", "mhc", "attnres", "prenorm"])
def test_remat_streams_computes_no_sublayer_again(row):
    """Sublayers wide enough that one of them shows: with `streams` hardly more operations than with `none`."""
    wide = ("model.layers=4", "model.width=128", "model.ffn=1024", "model.heads=8", "model.head_dim=64")

    def flops(remat):
        graphdef, params = nnx.split(rows.decoder(rows.tiny(row, *wide, "model.scan=false", f"model.remat={remat}")))
        gradient = jax.jit(jax.grad(lambda params: jnp.sum(jnp.square(nnx.merge(graphdef, params)(rows.tokens())))))
        return gradient.lower(params).compile().cost_analysis()["flops"]

    none, streams, full = (flops(remat) for remat in ("none", "streams", "full"))
    print(none, streams, full)
    assert streams < 1.05 * none and full > 1.2 * none


def test_remat_streams_keeps_one_stream_a_block():
    """Of six layers in blocks of two: the three blocks' streams, each layer's y, and no stream a layer."""
    tokens_BxT = rows.tokens()
    model = rows.decoder(rows.tiny("gr", "model.remat=streams", "model.remat_block=2", "model.layers=6"))
    forward, _ = scans_of_gradient(model, tokens_BxT)
    stream, y = (*tokens_BxT.shape, 4, 16), (*tokens_BxT.shape, 16)
    shapes = [a.shape for a in forward]
    assert (3, *stream) in shapes and (3, 2, *y) in shapes
    assert not {(6, *stream), (3, 2, *stream)} & set(shapes)


@pytest.mark.parametrize(
    "periods, period, n, most, block",
    [
        (28, 1, 4, 0, 4),
        (28, 1, 1, 0, 2),
        (7, 4, 4, 0, 1),
        (28, 1, 4, 7, 7),
        (28, 1, 4, 6, 4),
        (7, 4, 4, 3, 1),
        (47, 1, 4, 0, 1),
    ],
)
def test_blocks_are_those_of_the_formula(periods, period, n, most, block):
    """Of mHC's section 4.3.2 among the divisors: 28 layers of 4 streams: L_r = √(4 · 56/6) = 6.1 sites."""
    assert periods_of_a_block(periods, period, n, most) == block


def scans_of_gradient(model, tokens_BxT):
    """The forward and the backward scan over the layers: the shapes and dtypes that go in and come out."""
    graphdef, params = nnx.split(model)
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(tokens_BxT))))(params)
    scans = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    return [[v.aval for v in (*scan.invars, *scan.outvars)] for scan in scans]


def test_float8_streams_are_kept_in_eight_bits():
    """Under remat=full what goes from layer to layer, and what is kept for the backward pass, has 8 bits a value."""
    tokens_BxT = rows.tokens()
    model = rows.decoder(rows.tiny("gr", *FLOAT8, "model.remat=full", "model.layers=3"))
    forward, backward = scans_of_gradient(model, tokens_BxT)
    stream, kept = (*tokens_BxT.shape, 4, 16), (3, *tokens_BxT.shape, 4, 16)
    for arrays, shape in ((forward, stream), (forward, kept), (backward, kept)):
        found = [a for a in arrays if a.shape == shape]
        assert found and all(a.dtype == jnp.uint8 for a in found), (shape, found)


@pytest.mark.parametrize("block", [1, 2, 4])
def test_attention_residuals_keep_one_source_a_layer(block):
    """Under remat=full the sources are kept once, not once a layer: memory grows as the depth, not its square."""
    tokens_BxT = rows.tokens()
    model = rows.decoder(rows.tiny("attnres", f"residual.block={block}", "model.remat=full", "model.layers=5"))
    sources = 1 + -(-10 // block)
    for arrays in scans_of_gradient(model, tokens_BxT):
        assert any(a.shape == (*tokens_BxT.shape, sources, 16) for a in arrays)
        assert any(a.shape == (5, *tokens_BxT.shape, 16) for a in arrays)
        assert not any(a.shape == (5, *tokens_BxT.shape, sources, 16) for a in arrays)


@pytest.mark.parametrize("row", ["hc", "hc_static"])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_hc_starts_as_prenorm(row, streams):
    """HC's initial values make it the pre-norm network: the same logits within 1e-6, at any n."""
    tokens_BxT = rows.tokens()
    prenorm = rows.decoder(rows.tiny("prenorm"))(tokens_BxT)
    hc = rows.decoder(rows.tiny(row, f"residual.streams={streams}"))(tokens_BxT)
    np.testing.assert_allclose(hc, prenorm, atol=1e-6 * float(jnp.abs(prenorm).max()))


@pytest.mark.parametrize("row", rows.ROWS)
def test_rows_share_the_initial_values_of_what_they_share(row):
    """Every parameter that pre-norm has, by path, starts at the same value in every other row.

    But for the sublayers' matrices where a system asks for other sizes: those are the same draws.
    """
    base = dict(nnx.to_flat_state(nnx.state(rows.decoder(rows.tiny("prenorm")))))
    other = dict(nnx.to_flat_state(nnx.state(rows.decoder(rows.tiny(row)))))
    shared = [path for path in base if path in other]
    matrices = ("query", "key", "value", "output", "gate", "up", "down", "embedding", "head")
    assert sorted(path[-1] for path in shared if path[-1] in matrices) == sorted(matrices)
    system = residual.Residual.kinds[rows.tiny(row).residual.kind]
    rescales = system.initial_std is not residual.Residual.initial_std
    for path in shared:
        a, b = base[path].get_value(), other[path].get_value()
        if rescales and path[0] == "stacks" and path[-1] in matrices:
            np.testing.assert_allclose(b, a * (jnp.std(b) / jnp.std(a)), rtol=1e-4, atol=1e-6)
        else:
            np.testing.assert_array_equal(a, b)


def test_layers_seeds_and_names_draw_different_values():
    a, b = (nnx.state(rows.decoder(rows.tiny("gr", f"seed={seed}"))) for seed in (0, 1))
    layers = a["stacks"][0]["layers"][0]
    w0, w1 = layers["attention_site"]["w_down"].get_value()
    assert float(jnp.abs(w0 - w1).max()) > 0
    assert float(jnp.abs(a["head"].get_value() - b["head"].get_value()).max()) > 0
    ffn = layers["ffn"]
    assert float(jnp.abs(ffn["gate"].get_value() - ffn["up"].get_value()).max()) > 0


@pytest.mark.parametrize("row, more", [(row, ()) for row in rows.ROWS] + MIXED, ids=str)
def test_causal(row, more):
    """A changed token changes no earlier logits, and does change its own."""
    model = rows.decoder(rows.tiny(row, *more))
    tokens_BxT = rows.tokens()
    changed = tokens_BxT.copy()
    changed[:, 12] = (changed[:, 12] + 1) % 256
    a, b = model(tokens_BxT), model(changed)
    np.testing.assert_allclose(a[:, :12], b[:, :12], atol=1e-6)
    assert float(jnp.abs(a[:, 12:] - b[:, 12:]).max()) > 1e-2


@pytest.mark.parametrize("row", rows.ROWS)
def test_bf16_compute_stays_near_float32(row):
    tokens_BxT = rows.tokens()
    a = rows.decoder(rows.tiny(row))(tokens_BxT)
    b = rows.decoder(rows.tiny(row, "model.compute_dtype=bfloat16"))(tokens_BxT)
    assert b.dtype == jnp.float32
    error = jnp.sqrt(jnp.mean((a - b) ** 2) / jnp.mean(a**2))
    assert 0 < float(error) < 0.03


@pytest.mark.parametrize("row, more", MIXED, ids=str)
def test_documents_are_apart(row, more):
    """With separate_documents a document's logits are those it has alone, whatever it is packed with; without, not."""
    packed_BxT = rows.tokens(1, 40) % 255 + 1
    packed_BxT[0, [0, 13, 30]] = 0
    for apart in (True, False):
        model = rows.decoder(rows.tiny(row, *more, f"model.separate_documents={str(apart).lower()}"))
        rows.randomise(model, 0.1)
        logits, alone = model(packed_BxT)[:, 13:30], model(packed_BxT[:, 13:30])
        assert (float(jnp.abs(logits - alone).max()) < 1e-4 * float(jnp.abs(alone).max())) is apart


@pytest.mark.parametrize("row", rows.OF_EACH_KIND)
def test_every_parameter_of_the_layers_learns(row):
    """At step 0 every parameter of every sublayer has a gradient, around any residual system.

    But for the gain before a convolution that starts at zero, and where sublayers start at zero themselves (ReZero).
    """
    model = rows.decoder(rows.tiny(row, *rows.HYBRID))
    _, grads = value_and_grads(model, rows.tokens(4, 32))
    silent = set()
    for path, g in nnx.to_flat_state(grads):
        g = np.asarray(g.get_value())
        if not any(str(part).endswith("_site") or part == "residual" for part in path):
            apart = g.reshape(g.shape[0] if path[0] == "stacks" else 1, -1)
            silent |= {path[-1]} if np.any(np.abs(apart).max(axis=1) == 0) else set()
    assert silent == ({"conv_gain"} if row != "rezero" else silent)


def test_statistics_are_of_each_layer_and_their_losses_are_weighted():
    """One balance a mixture of experts and one divergence a sparse attention; the loss beside the loss is their mean,
    weighted, and the training step reports the loss without it."""
    config = rows.tiny("gr", *rows.HYBRID, "model.moe.balance=0.5", "model.qsa.loss=2.0")
    model = rows.decoder(config)
    tokens_BxT = rows.tokens(4, 32)
    logits_BxTxV, found = model.with_statistics(tokens_BxT)
    assert {name: v.shape for name, v in found.items()} == {
        "balance": (4,), "router_entropy": (4,), "busiest_expert": (4,), "index_kl": (2,)
    }  # fmt: skip
    weighted = 0.5 * found["balance"].mean() + 2.0 * found["index_kl"].mean()
    np.testing.assert_allclose(model.auxiliary_loss(found), weighted, rtol=1e-6)
    assert rows.decoder(rows.tiny("gr")).auxiliary_loss({}) == 0

    trainer = make_trainer(config, 256, parallel.make_mesh(config.mesh))
    batch = {"tokens_BxT": tokens_BxT, "targets_BxT": tokens_BxT}
    _, got = trainer.step(trainer.init(), batch)
    np.testing.assert_allclose(got["loss"], jnp.mean(token_nats(logits_BxTxV, tokens_BxT)), rtol=1e-5)
    np.testing.assert_allclose(got["balance"], found["balance"].mean(), rtol=1e-5)


@pytest.mark.parametrize(("layers", "pattern", "alone", "expected"), [
    (6, 1, [], [(0, 6)]), (8, 4, [], [(0, 2)]), (12, 4, [1], [(0, 1), (4, 2)]), (4, 1, [1], [(0, 1), (1, 1), (2, 2)]),
    (6, 2, [2, 3], [(0, 1), (2, 1), (4, 1)]), (4, 4, [0, 3], [(0, 1)]),
])  # fmt: skip
def test_a_period_with_ngrams_is_a_stack_of_its_own(layers, pattern, alone, expected):
    assert runs(layers, pattern, alone) == expected


@pytest.mark.parametrize("init, factor", [("times_sqrt_n", 2.0), ("over_sqrt_n", 0.5)])
def test_hc_scales_the_initial_output_projections(init, factor):
    plain = nnx.state(rows.decoder(rows.tiny("hc")))["stacks"][0]["layers"][0]
    scaled = nnx.state(rows.decoder(rows.tiny("hc", f"residual.output_init={init}")))["stacks"][0]["layers"][0]
    for module, name, expected in (("attention", "output", factor), ("ffn", "down", factor), ("ffn", "up", 1.0)):
        a, b = plain[module][name].get_value(), scaled[module][name].get_value()
        np.testing.assert_allclose(b, expected * a, rtol=1e-6)


def test_grouped_queries_share_their_key_head():
    """With as many key heads as query heads, filled with copies, attention is the same as with groups."""
    grouped = rows.decoder(rows.tiny("prenorm", "model.heads=4", "model.kv_heads=2", "model.head_dim=4"))
    whole = rows.decoder(rows.tiny("prenorm", "model.heads=4", "model.kv_heads=4", "model.head_dim=4"))
    a, b = (rows.layers(model).attention for model in (grouped, whole))
    for name in ("key", "value"):
        getattr(b, name)[...] = getattr(a, name)[...].repeat(2, axis=2)  # [L, D, K, C]
    np.testing.assert_allclose(grouped(rows.tokens()), whole(rows.tokens()), atol=1e-5)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.layers=0", "model.layers=0: must be above 0"),
        ("model.width=-1", "model.width=-1: must be above 0"),
        ("model.kv_heads=3", "model.kv_heads=3: must divide model.heads=2"),
        ("model.head_dim=7", "model.head_dim=7: RoPE turns channels in pairs: 7 of"),
        ("model.remat=ful", "model.remat='ful': did you mean 'full'?"),
        ("model.compute_dtype=float16", "model.compute_dtype='float16'"),
        ("model.pattern=gdn,atention", "model.pattern='atention': did you mean 'attention'?"),
        ("model.pattern=gdn,gdn,attention", "model.layers=2: must be a multiple of the 3 layers of model.pattern="),
        ("model.rope_fraction=0.4", "model.rope_fraction=0.4: RoPE turns channels in pairs: 3.2 of model.head_dim=8"),
        ("model.rope_fraction=0.3", "model.rope_fraction=0.3: RoPE turns channels in pairs: 2.4 of model.head_dim=8"),
        ("model.rope_fraction=0.375", "model.rope_fraction=0.375: RoPE turns channels in pairs: 3 of"),
        ("model.head_dim=7 model.rope_fraction=0.5", "model.rope_fraction=0.5: RoPE turns channels in pairs: 3.5 of"),
        ("model.rope_fraction=1.5", "model.rope_fraction=1.5: must lie in (0, 1]"),
        ("model.ngram.layers=3", "model.ngram.layers='3': layers from 1 to 2 in order"),
        ("model.ngram.layers=second", "model.ngram.layers='second': layers from 1 to 2 in order"),
        ("model.ngram.layers=1 model.ngram.width=63", "model.ngram.width=63: must be a multiple of the 16 heads"),
        ("model.ngram.layers=1 model.ngram.size=1", "model.ngram.size=1: at least 2"),
        (
            "model.pattern=gdn model.gdn.value_heads=3",
            "model.gdn.value_heads=3: must be a multiple of model.gdn.key_heads=2",
        ),
        ("model.pattern=gdn model.gdn.chunk=48", "model.gdn.chunk=48: must be a power of two"),
        ("model.pattern=qsa model.qsa.budget=6", "model.qsa.budget=6: must be a multiple of model.qsa.block=4"),
        ("model.pattern=qsa model.qsa.head_dim=4", "model.qsa.head_dim=4: at least the 8 channels"),
        ("model.moe.experts=2 model.moe.top_k=3", "model.moe.top_k=3: at most model.moe.experts=2"),
        ("model.moe.experts=2 model.moe.shared=-1", "model.moe.shared=-1: must not be negative"),
        ("model.moe.balance=-0.5", "model.moe.balance=-0.5: must not be negative"),
        ("model.qsa.loss=-1", "model.qsa.loss=-1.0: must not be negative"),
    ],
)
def test_wrong_models_are_one_line(override, line):
    config = rows.tiny("prenorm", *override.split())
    with pytest.raises(UsageError) as e:
        Decoder(config.model, config.residual, 256, jax.random.key(0))
    assert line in str(e.value)
