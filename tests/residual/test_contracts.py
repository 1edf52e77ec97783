"""What every residual system promises, over every row: a new row is tested by being registered.

Seen to fail: the transposed map (`mix` with H transposed, Sinkhorn with columns last) breaks
`test_equal_streams_stay_equal`; leaving H_res out of `write` breaks `test_the_mixing_is_applied`; a cast of the stream
to the compute dtype breaks `test_dtypes`; a parameter that the read does not use, and GR's projections started at zero,
break `test_every_parameter_learns_and_the_streams_separate`; HC's and mHC's maps in the compute dtype break
`test_maps_do_not_depend_on_the_compute_dtype`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from grlab import residual
from grlab.errors import UsageError
from grlab.model import token_nats
from grlab.ops import streams as ops
from grlab.ops.sinkhorn import sinkhorn, sinkhorn_v4
from grlab.params import Fixed
from grlab.residual.mhc import V4_EPS
from grlab.train import optimizer
from tests import rows

MIXING = ("b_res", "phi_res", "w_res", "a_r", "w_r")  # the names of the parameters that make an H_res


def has_streams(config) -> bool:
    return "streams" in config.residual


@pytest.mark.parametrize("setting", rows.SETTINGS)
def test_equal_streams_stay_equal(setting):
    """Equal streams and y = 0 come out unchanged within 1e-6, with logits of the maps of standard deviation 5."""
    system, config = rows.system(*rows.SETTINGS[setting])
    if not has_streams(config):
        pytest.skip("one stream")
    if not system.keeps_equal_streams:
        pytest.skip("a free H_res: its rows need not sum to 1")
    x_BxTxD = jax.random.normal(jax.random.key(1), (2, 8, 16))
    stream = system.expand(x_BxTxD)
    site = system.site(1, jax.random.key(2))
    rows.randomise(site, 5.0, names=("b_res", "b_pre", "b_post"))
    _, gates = site.read(stream)
    out = site.write(stream, jnp.zeros_like(x_BxTxD), gates)
    eps = V4_EPS if config.residual.get("form") == "deepseek_v4" else 0.0  # it divides by the sum + 1e-6
    np.testing.assert_allclose(out, stream, atol=(1e-6 + eps) * float(jnp.abs(stream).max()))


@pytest.mark.parametrize("form", ["paper", "deepseek_v4"])
def test_equal_streams_stay_equal_with_dynamic_logits(form):
    """The same where the logits of standard deviation 5 come from the data, not from b."""
    system = residual.build({"kind": "mhc", "form": form}, width=16, layers=1, key=jax.random.key(0))
    site = system.site(0, jax.random.key(1))
    site.alpha_res[...] = jnp.asarray(1.0)
    site.phi_res[...] = 5 / 8 * jax.random.normal(jax.random.key(2), site.phi_res.shape)  # std of x̂ φ: √64 · 5/8
    stream = system.expand(jax.random.normal(jax.random.key(3), (2, 8, 16)))
    out = site.write(stream, jnp.zeros((2, 8, 16)), site.read(stream)[1])
    eps = V4_EPS if form == "deepseek_v4" else 0.0  # it divides by the sum + 1e-6: its rows sum to 1 − 1e-6
    np.testing.assert_allclose(out, stream, atol=(1e-6 + eps) * float(jnp.abs(stream).max()))


@pytest.mark.parametrize("setting", rows.SETTINGS)
def test_the_mixing_is_applied(setting):
    """With y = 0 and unequal streams, a row that has an H_res gives H_res R: neither R nor H_resᵀ R."""
    system, config = rows.system(*rows.SETTINGS[setting])
    site = system.site(0, jax.random.key(2))
    mixing = [name for name in MIXING if hasattr(site, name) and not isinstance(getattr(site, name), Fixed)]
    if not mixing or config.residual.streams == 1:
        pytest.skip("no H_res")
    rows.randomise(site, 2.0, names=(*MIXING, "lam_res"), fresh=True)
    stream = jax.random.normal(jax.random.key(3), (2, 8, config.residual.streams, 16))
    y_BxTxD = jnp.zeros((2, 8, 16))
    _, gates = site.read(stream)
    out = site.write(stream, y_BxTxD, gates)
    h_NxN = np.asarray(gates[1], np.float64)
    h_NxN = np.swapaxes(h_NxN, -1, -2) if hasattr(site, "a_r") else h_NxN  # HC applies A_r transposed
    right = h_NxN @ np.asarray(stream, np.float64)
    wrong = np.swapaxes(h_NxN, -1, -2) @ np.asarray(stream, np.float64)
    np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-5)
    assert np.abs(out - wrong).max() > 0.1
    assert np.abs(out - stream).max() > 0.1


@pytest.mark.parametrize("setting", rows.SETTINGS)
def test_every_parameter_learns_and_the_streams_separate(setting):
    """At step 0 every parameter has a gradient in every layer, but those whose start is asleep by the paper's design;
    after the first update they have one, too (in some layer: the first site's streams are copies for ever). Within 30
    AdamW updates the streams of a token differ."""
    config = rows.tiny(*rows.SETTINGS[setting], "optim.warmup=0", "optim.lr=1e-2")
    model = rows.decoder(config)
    graphdef, params = nnx.split(model)
    tokens_BxT = rows.tokens(4, 32)
    tx = optimizer.make(config.optim, 100, params)

    @jax.jit
    def step(params, opt_state):
        def loss(p):
            return jnp.mean(token_nats(nnx.merge(graphdef, p)(tokens_BxT), tokens_BxT))

        grads = jax.grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return grads, optax.apply_updates(params, updates), opt_state

    def silent(grads, layers, rounding):
        """The names of parameters whose gradient is within `rounding` of 0 in `layers` (all or any) of the layers."""
        trained = [(path, g) for path, g in nnx.to_flat_state(grads) if not isinstance(g, Fixed)]
        flat = [(path, np.asarray(g.get_value())) for path, g in trained]
        noise = rounding * max(np.abs(g).max() for _, g in flat)
        names = set()
        for path, g in flat:
            g_LxX = g.reshape(config.model.layers if path[0] == "stacks" else 1, -1)
            if layers(np.abs(g_LxX).max(axis=1) <= noise):
                names.add(path[-1])
        return names

    first, params, opt_state = step(params, tx.init(params))
    assert silent(first, np.any, 1e-7) <= model.residual.asleep_at_start
    second, params, opt_state = step(params, opt_state)
    assert not silent(second, np.all, 1e-10)  # where the streams are copies, rounding leaves up to 2e-11

    if not has_streams(config) or config.residual.streams == 1:
        return
    for _ in range(28):
        _, params, opt_state = step(params, opt_state)
    model = nnx.merge(graphdef, params)
    stream, _ = model.run_layers(model.residual.expand(model.embedding[...][tokens_BxT]), tokens_BxT)
    assert jnp.std(stream, axis=2).mean() > 1e-3 * jnp.std(stream)


@pytest.mark.parametrize("row", rows.ROWS)
@pytest.mark.parametrize("stream_dtype", ["float32", "bfloat16"])
def test_dtypes(row, stream_dtype):
    """bf16 compute: the sublayer's input is bf16, the stream keeps its own dtype, the gates and maps are float32."""
    fields = rows.tiny(row).residual.to_dict() | {"stream_dtype": stream_dtype}
    system = residual.build(fields, width=16, layers=2, key=jax.random.key(0), compute_dtype="bfloat16")
    site = system.site(1, jax.random.key(1))
    stream = system.expand(jax.random.normal(jax.random.key(2), (2, 4, 16), jnp.bfloat16))
    x_BxTxD, gates = site.read(stream)
    out = site.write(stream, x_BxTxD, gates)
    assert x_BxTxD.dtype == jnp.bfloat16
    assert jax.tree.map(lambda s: s.dtype, out) == jax.tree.map(lambda s: s.dtype, stream)
    assert all(leaf.dtype == stream_dtype for leaf in jax.tree.leaves(out))
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(gates))
    assert system.collapse(out).dtype == jnp.bfloat16
    assert all(p.get_value().dtype == jnp.float32 for _, p in nnx.to_flat_state(nnx.state((system, site))))


@pytest.mark.parametrize("row", rows.ROWS)
def test_maps_do_not_depend_on_the_compute_dtype(row):
    """The maps of HC and mHC are float32 throughout: the same bits whatever the sublayers compute in."""
    fields = rows.tiny(row).residual.to_dict()
    if fields["kind"] not in ("hc", "mhc"):
        pytest.skip("no maps; GR's products are in the compute dtype, its gates of them in float32")
    gates = []
    for dtype in ("float32", "bfloat16"):
        system = residual.build(fields, width=16, layers=2, key=jax.random.key(0), compute_dtype=dtype)
        site = system.site(1, jax.random.key(1))
        rows.randomise(site, 0.5)
        stream = system.expand(jax.random.normal(jax.random.key(2), (2, 4, 16)))
        gates.append(jax.tree.leaves(site.read(stream)[1]))
    assert gates[0]
    for a, b in zip(*gates, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("row", rows.ROWS)
def test_one_stream_is_refused_where_the_system_needs_more(row):
    fields = rows.tiny(row).residual.to_dict()
    if "streams" not in fields:
        pytest.skip("one stream")

    def build(n):
        return residual.build(fields | {"streams": n}, width=16, layers=2, key=jax.random.key(0))

    for n in (0, -1):
        with pytest.raises(UsageError, match="residual.streams"):
            build(n)
    if residual.Residual.kinds[fields["kind"]].min_streams == 1:
        assert build(1).expand(jnp.zeros((1, 1, 16))).shape == (1, 1, 1, 16)
    else:
        with pytest.raises(UsageError, match="residual.streams=1"):
            build(1)
    build(2), build(3)


@pytest.mark.parametrize("setting", rows.SETTINGS)
def test_weight_decay_falls_on_matrices_alone(setting):
    """No gate bias, static map, norm gain or scale decays; every drawn matrix, and HC's dynamic W, does."""
    for path, variable in nnx.to_flat_state(
        nnx.state(nnx.eval_shape(lambda: rows.build(rows.tiny(*rows.SETTINGS[setting]))))
    ):
        drawn = path[-1] in ("embedding", "head", "query", "key", "value", "output", "gate", "up", "down")
        assert variable.decay is (drawn or path[-1].startswith(("w_", "phi_"))), path


PROJECTIONS = {  # name -> (projection of logits to an H_res, the shape of a token's logits)
    "sinkhorn": (lambda logits: sinkhorn(logits, 20), (4, 4)),
    "sinkhorn_v4": (lambda logits: sinkhorn_v4(logits, 20, V4_EPS), (4, 4)),
    "permutations": (lambda logits: ops.permutation_mixture(logits, 4), (24,)),
}


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("std", [1.0, 3.0, 30.0, 1e4])
def test_projections_are_finite_and_their_rows_sum_to_one(name, dtype, std):
    """For logits up to ±1e4, float32 or bf16, values and gradients are finite and each row sums to 1, in float32."""
    project, shape = PROJECTIONS[name]
    logits = (std * jax.random.normal(jax.random.key(0), (64, *shape))).astype(dtype)

    @jax.jit
    def value_and_gradient(logits):
        h, vjp = jax.vjp(project, logits)
        return h, vjp(2 * h)[0]

    h, grad = value_and_gradient(logits)
    assert h.dtype == jnp.float32 and bool(jnp.all(jnp.isfinite(h))) and bool(jnp.all(jnp.isfinite(grad)))
    np.testing.assert_allclose(h.sum(-1), 1, atol=1e-6 + V4_EPS * (name == "sinkhorn_v4"))
    if std == 1.0:
        np.testing.assert_allclose(h.sum(-2), 1, atol=5e-3)


def test_the_start_of_gr_is_half_the_prenorm_read_and_writes_near_one():
    """At init G ≈ 0.5 and s ≈ 1: x ≈ RMSNorm(embedding) / 2 (or the whole of it with gate_range=2)."""
    x_BxTxD = jax.random.normal(jax.random.key(0), (2, 8, 256))
    for gate_range in (1, 2):
        fields = {"kind": "gr", "rank": 32, "gate_range": gate_range}
        system = residual.build(fields, width=256, layers=1, key=jax.random.key(1))
        x_read, (s, _) = system.site(0, jax.random.key(2)).read(system.expand(x_BxTxD))
        np.testing.assert_allclose(x_read, 0.5 * gate_range * ops.rms_normalise(x_BxTxD, 1e-6), atol=0.05 * gate_range)
        np.testing.assert_allclose(s, 1.0, atol=0.5)
        assert 0.05 < float(jnp.std(jnp.log(s / (2 - s)))) < 0.3  # the logit's spread: 0.16 at d = 256


def test_mhc_starts_near_the_plain_residual():
    """The identity-like start: H_res is the identity and the stream that of pre-norm within 1 %."""
    system = residual.build({"kind": "mhc"}, width=64, layers=1, key=jax.random.key(0))
    stream = system.expand(jax.random.normal(jax.random.key(1), (2, 8, 64)))
    y_BxTxD = jax.random.normal(jax.random.key(2), (2, 8, 64))
    site = system.site(0, jax.random.key(3))
    _, gates = site.read(stream)
    out = site.write(stream, y_BxTxD, gates)
    np.testing.assert_allclose(out, stream + y_BxTxD[:, :, None], atol=0.01 * float(jnp.abs(out).max()))


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"kind": "grr"}, "residual.kind='grr': did you mean 'gr'?"),
        ({"kind": "gr", "stream": 4}, "residual='stream': did you mean 'streams'?"),
        ({"kind": "gr", "mix": "fre"}, "residual.mix='fre': did you mean 'free'?"),
        ({"kind": "gr", "streams": "4"}, "residual.streams='4': must be of type int"),
        ({"kind": "gr", "rank": 0}, "residual.rank=0: must be above 0"),
        ({"kind": "gr", "top_k": 5}, "residual.top_k=5: must lie in 0 .. streams=4"),
        ({"kind": "gr", "gates": "static", "static_term": True}, "residual.static_term=True"),
        ({"kind": "gr", "gate": "tanh", "gate_range": 2}, "residual.gate_range=2"),
        ({"kind": "gr", "gates": "static", "gate_input": "last"}, "residual.gate_input='last'"),
        ({"kind": "mhc", "iterations": 0}, "residual.iterations=0: must be above 0"),
        ({"kind": "prenorm", "streams": 4}, "residual='streams': takes no switches"),
        ({"kind": "gr", "stream_dtype": "float16"}, "residual.stream_dtype='float16'"),
        ({"kind": "gr", "gated_norm": 4}, "residual.gated_norm=4: GR's read is a gated norm"),
        ({"kind": "prenorm", "gated_norm": -1}, "residual.gated_norm=-1: must be above 0"),
        ({"kind": "mhc", "form": "lite", "streams": 7}, "residual.streams=7: a mixture of all 5040 permutations"),
        ({"kind": "gr", "mix": "permutations", "streams": 7}, "residual.streams=7: a mixture of all 5040"),
        ({"kind": "attnres", "block": 0}, "residual.block=0: must be above 0"),
        ({"kind": "layerscale", "start": 0.0}, "residual.start=0.0: must be above 0"),
        ({"kind": "layerscale", "start": 1}, "residual.start=1: must be of type float"),
    ],
)
def test_wrong_switches_are_one_line(fields, line):
    with pytest.raises(UsageError) as e:
        residual.build(fields, width=16, layers=2, key=jax.random.key(0))
    assert line in str(e.value)
    assert "\n" not in str(e.value)


def products(jaxpr):
    """The matrix products of a program and of the programs in it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for parameter in jax.tree.leaves(list(equation.params.values())):
            if hasattr(parameter, "eqns") or hasattr(parameter, "jaxpr"):
                yield from products(getattr(parameter, "jaxpr", parameter))


@pytest.mark.parametrize("row", rows.ROWS)
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_float32_products_are_not_left_to_the_accelerator(row, compute_dtype):
    """Every product of two float32 arrays in a read or a write asks for full precision: a TPU's default is bf16."""
    fields = rows.tiny(row).residual.to_dict()
    system = residual.build(fields, width=16, layers=2, key=jax.random.key(0), compute_dtype=compute_dtype)
    site = system.site(1, jax.random.key(1))
    stream = system.expand(jnp.ones((2, 4, 16)))

    def read_and_write(stream):
        x_BxTxD, gates = site.read(stream)
        return site.write(stream, x_BxTxD, gates)

    found = list(products(jax.make_jaxpr(read_and_write)(stream).jaxpr))
    has_matrices = any(path[-1].startswith(("w_", "phi_")) for path, _ in nnx.to_flat_state(nnx.state(site)))
    assert found or not has_matrices
    for equation in found:
        if all(v.aval.dtype == jnp.float32 for v in equation.invars):
            assert equation.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2, equation
