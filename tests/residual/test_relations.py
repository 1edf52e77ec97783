"""What the systems are to each other and to foreign code, beyond each one's own equations.

Seen to fail: p transposed, the innovation against the old block, g on the prediction (AltUp); β on the query; the gate
of GatedNorm from the norm's input.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grlab import residual
from grlab.model import Layer
from grlab.ops import streams as ops
from grlab.residual import deepnorm, gr
from grlab.residual.stream import Frame, Norm
from tests import rows
from tests.residual import starts
from tests.residual.functional import error, with_parameters

KEY = jax.random.key(0)


def test_altup_is_gemma3n_s_predict_and_correct():
    """Values and gradients against transformers, where its router is a constant: tests/goldens/make_altup.py."""
    with np.load(pathlib.Path(__file__).parents[1] / "goldens" / "altup_k3_d8.npz") as arrays:
        golden = dict(arrays)
    system = residual.build({"kind": "altup", "streams": 3}, width=8, layers=2, key=KEY)
    site = system.site(int(golden["active"]), KEY)  # alternating: block k mod 3
    at = {"p": golden["p"], "g": golden["g"], "stream": golden["in/stream"], "y": golden["in/y"]}

    def scalar(at):
        values = {"norm.gain": jnp.zeros(8), "p": at["p"], "g": at["g"]}
        new = with_parameters(site, values).write(at["stream"], at["y"], None)
        return jnp.sum(new * golden["cot"]), new

    (_, new), gradient = jax.value_and_grad(scalar, has_aux=True)(jax.tree.map(jnp.float32, at))
    assert error(new, golden["new"]) < 2e-6
    for name, value in gradient.items():
        assert error(value, golden[f"grad/{name}"]) < 2e-6, name


def test_gated_norm_is_the_read_of_gr_with_one_stream():
    """The same matrices: GR's read at n = 1, where the mean over streams and the 1/n are nothing, is GatedNorm."""
    d, r = 16, 4
    frame = Frame(d, 2, 1e-6, jnp.dtype("float32"), jnp.dtype("float32"), gated_norm=r)
    plain = Frame(d, 2, 1e-6, jnp.dtype("float32"), jnp.dtype("float32"))
    norm = Norm(frame, KEY)
    read = gr.GatedSite(gr.GatedResidual.Switches(streams=1, rank=r), plain, 0, KEY, writes=False)
    rows.randomise(norm, 0.5)
    read.gain[...], read.w_down[...], read.w_up[...] = norm.gain[...][None], norm.w_down[...], norm.w_up[...]
    x_BxTxD = jax.random.normal(KEY, (2, 8, d))
    np.testing.assert_allclose(norm(x_BxTxD), read.read(x_BxTxD[:, :, None])[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("d, init_std", [(2560, 0.02), (64, 64**-0.5)])
def test_the_gates_of_gr_start_with_the_published_spread_at_every_width(d, init_std):
    """Logits of standard deviation 0.1 (reads) and 0.5 (writes) at d = 2560 and 0.02; elsewhere at 1/√d, rank d/8."""
    frame = Frame(d, 2, 1e-6, jnp.dtype("float32"), jnp.dtype("float32"))
    spreads = []
    for seed in range(4):
        switches = gr.GatedResidual.Switches(rank=d // 8, init_std=init_std)
        site = gr.GatedSite(switches, frame, 0, jax.random.key(seed))
        stream = ops.repeat(jax.random.normal(jax.random.key(100 + seed), (1, 32, d)), 4)
        source, divisor = site._gate_input(site.normalise(stream))
        logits = [site._logits(name, of, source, divisor) for name, of in (("read", "channel"), ("write", "scalar"))]
        spreads.append([jnp.std(v) for v in logits])
    np.testing.assert_allclose(np.mean(spreads, axis=0), [0.1, 0.5], rtol=0.2)


def test_full_attention_residuals_are_blocks_of_one():
    """The full form, in which every output is a source of its own, is the block form's whole model with S = 1."""
    one, everything = (rows.decoder(rows.tiny("attnres_block", f"residual.block={s}")) for s in (1, 4))
    for model in (one, everything):  # with queries at 0 both of them read the same direction
        rows.randomise(model, 1.0, names=("q",))
    tokens_BxT = rows.tokens()

    @jax.jit
    def full(tokens_BxT):
        layer = rows.layers(one)
        sites = [layer.attention_site.attend.q[...], layer.ffn_site.attend.q[...]]
        queries = [*jnp.stack(sites, axis=1).reshape(4, -1), one.residual.final.q[...]]
        sources = [starts.embed(one, tokens_BxT)]
        for sublayer, q in zip([*starts.sublayers(one), lambda x: x @ one.head[...]], queries, strict=True):
            there = jnp.stack(sources)
            weights = jax.nn.softmax(starts.norm(there) @ q, axis=0)
            sources.append(sublayer(starts.norm(jnp.einsum("s...,s...d->...d", weights, there))))
        return sources[-1]

    logits = full(tokens_BxT)
    assert error(jax.jit(one.__call__)(tokens_BxT), logits) < starts.EXACT
    assert error(jax.jit(everything.__call__)(tokens_BxT), logits) > 0.1


@pytest.mark.parametrize("layers", [4, 28, 100])
def test_deepnorm_bounds_the_update_of_the_whole_model(layers):
    """The condition that α and β solve: 2M (v² + w²) / α² is 1 at any depth, v = w = β (DeepNorm, section 4)."""
    assert 2 * layers * 2 * deepnorm.beta(layers) ** 2 / deepnorm.alpha(layers) ** 2 == pytest.approx(1)


def test_deepnorm_variances_at_init():
    """Xavier-normal with gain β on the FFN, value and output, 1 on query and key; so an attention's output has the
    variance β⁴ of its input where all tokens are one, whatever query and key are."""
    layers, d = 8, 256
    shape = ["width=256", "heads=8", "kv_heads=8", "head_dim=32", "ffn=512", f"layers={layers}"]
    config = rows.tiny("deepnorm", *(f"model.{s}" for s in shape))
    system = residual.build(config.residual, width=d, layers=layers, key=KEY)
    layer = Layer(config.model, system, "attention", 0, KEY)
    beta = (8 * layers) ** -0.25
    for module, name, fans, gain in (
        (layer.attention, "query", 2 * d, 1.0), (layer.attention, "key", 2 * d, 1.0),
        (layer.attention, "value", 2 * d, beta), (layer.attention, "output", 2 * d, beta),
        (layer.ffn, "gate", d + 512, beta), (layer.ffn, "up", d + 512, beta), (layer.ffn, "down", d + 512, beta),
    ):  # fmt: skip
        assert float(jnp.std(getattr(module, name)[...])) == pytest.approx(gain * (2 / fans) ** 0.5, rel=0.02), name
    x_BxTxD = jnp.repeat(jax.random.normal(KEY, (64, 1, d)), 4, axis=1)
    y_BxTxD, _ = layer.attention(x_BxTxD)
    assert float(jnp.var(y_BxTxD)) == pytest.approx(beta**4, rel=0.05)
    layer.attention.query[...] *= 10
    np.testing.assert_allclose(layer.attention(x_BxTxD)[0], y_BxTxD, rtol=1e-4, atol=1e-5)
