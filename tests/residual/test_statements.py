"""Every kind and switch against its float64 statement: values, and gradients of all parameters and inputs.

Error is max|a - b| / max|b| of an array. Measured in float32: values 4e-7, gradients 3.4e-6 against finite differences.

Seen to fail with all that `test_goldens.py` lists but the last and the eps on H_pre, and with each of these, which only
the statements see: H_res transposed (GR free, mHC paper); H_res computed and never applied; no 1/n in GR's free H_res;
the static term doubled; top_k of the lowest; gate_input=last from the first stream; HC's A_r not transposed; its static
part inside the tanh; its s_alpha and s_beta swapped; no 2 in the paper form's H_post; Sinkhorn rows first and columns
last, with and without a transposition; the final norm's eps without its n²; pre-norm writing 2 y; AttnRes reading a
block that has not begun, and writing to the block before; the permutations transposed; a frozen map with a dynamic
part; width only writing to the next stream; λ of LayerScale left out; c on the stream; ReZero starting at 1
(`test_start`).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grlab import residual
from tests import rows
from tests.residual import functional, statements, systems
from tests.residual.functional import error

B, T, N, D = 2, 2, 3, 5
# Larger than in use, so that a misplaced eps, or one that is scaled otherwise, is seen; of one stream larger still: the
# scale of what is read has a gradient through eps alone, and a small one would be rounding.
EPS, EPS_OF_ONE_STREAM = 1e-2, 1e-1
CASES = [(kind, k, case) for kind, m in systems.ALL.items() for case in m.CASES for k in getattr(m, "SITES", (1,))]


def draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A float32 value for a parameter, large enough for gates far from their centre and maps far from symmetric."""
    v = rng.standard_normal(shape)
    leaf = name.split(".")[-1]
    if leaf.startswith(("w_", "phi_")):
        v = 2 * v / np.sqrt(shape[0])  # at 3 a tanh may be so near 1 that float32 keeps few digits of its slope
    elif leaf.startswith(("alpha_", "head_alpha", "s_", "lam_")):
        v = 0.7 + 0.2 * v
    return v.astype(np.float32)


def name_case(value) -> str:
    return str(value) if not isinstance(value, dict) else "-".join(f"{k}={v}" for k, v in value.items()) or "default"


def test_every_kind_has_a_statement():
    assert set(systems.ALL) == set(residual.kinds())


@pytest.mark.parametrize("kind, k, switches", CASES, ids=name_case)
def test_values_and_gradients(kind, k, switches):
    rng = np.random.default_rng(0)
    statement = systems.ALL[kind]
    if "streams" in {f.name for f in dataclasses.fields(residual.Residual.kinds[kind].Switches)}:
        switches = {"streams": N} | switches
    key = jax.random.key(0)
    layers = getattr(statement, "LAYERS", 2)
    eps = EPS_OF_ONE_STREAM if switches.get("streams") == 1 else EPS
    model = residual.build({"kind": kind, **switches}, width=D, layers=layers, key=key, norm_eps=eps)
    site = model.site(k, key)
    switches = {name: v for name, v in switches.items() if name not in ("gated_norm", "rank")}

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    x_BxTxD = normal(B, T, D)
    theirs = statement.expand(x_BxTxD, **switches)
    for ours, stated in zip(jax.tree.leaves(model.expand(jnp.asarray(x_BxTxD))), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(ours, stated)

    def unequal(v):  # streams of different sizes
        v = normal(*v.shape)
        return v * np.geomspace(0.5, 2, v.shape[2]).astype(np.float32)[:, None] if v.ndim == 4 else v

    structure = jax.tree.structure(model.expand(jnp.asarray(x_BxTxD)))
    at = {("in", "y"): normal(B, T, D)}
    names = [f"stream{i}" for i in range(len(jax.tree.leaves(theirs)))]
    at |= {("in", name): unequal(v) for name, v in zip(names, jax.tree.leaves(theirs), strict=True)}
    for part, module in (("site", site), ("end", model)):
        at |= {(part, name): draw(name, v.shape, rng) for name, v in functional.parameters(module).items()}
    cotangents = [normal(*v.shape) for v in (x_BxTxD, *(at["in", name] for name in names), x_BxTxD)]

    def parts_of(at):
        parts = {part: {k: v for (p, k), v in at.items() if p == part} for part in ("site", "end", "in")}
        return parts["site"], parts["end"], [parts["in"][name] for name in names], parts["in"]["y"]

    def ours(at):
        of_site, of_end, stream, y = parts_of(at)
        connection, stream = functional.with_parameters(site, of_site), jax.tree.unflatten(structure, stream)
        x, gates = connection.read(stream)
        new = connection.write(stream, y, gates)
        out = [x, *jax.tree.leaves(new), functional.with_parameters(model, of_end).collapse(stream)]
        return sum((a * c).sum() for a, c in zip(out, cotangents, strict=True)), out

    def stated(at):
        of_site, of_end, stream, y = parts_of(at)
        stream = stream[0] if isinstance(theirs, np.ndarray) else tuple(stream)
        x, new = statement.site(of_site, stream, y, k=k, eps=eps, **switches)
        return [x, *jax.tree.leaves(new), statement.collapse(of_end, stream, eps=eps, **switches)]

    at_64 = {k: v.astype(np.float64) for k, v in at.items()}
    (_, out), gradient = functional.compiled(jax.value_and_grad(ours, has_aux=True))(at)
    for i, (a, b) in enumerate(zip(out, stated(at_64), strict=True)):
        assert error(a, b) < 2e-6, f"output {i} of x, the stream, the end"

    def scalar(at):
        return sum((a * c).sum() for a, c in zip(stated(at), cotangents, strict=True))

    wanted = statements.finite_differences(scalar, at_64)
    assert all(np.abs(v).max() > 1e-3 for v in wanted.values()), "a parameter that changes nothing tests nothing"
    errors = {k: error(gradient[k], wanted[k]) for k in at}
    assert max(errors.values()) < 1e-5, {
        k: e for k, e in errors.items() if e > 1e-6
    }  # measured: 3.4e-6, HC's s_alpha, a sum that cancels


@pytest.mark.parametrize("row", rows.ROWS)
def test_start(row):
    """What the row is at step 0: the start contract of the README's table, a whole model against a plain loop."""
    config = rows.tiny(row)
    model, tokens_BxT = rows.decoder(config), rows.tokens()
    logits, tolerance = systems.ALL[config.residual.kind].start(model, tokens_BxT)
    assert error(model(tokens_BxT), logits) < tolerance
