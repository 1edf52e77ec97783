"""Every kind and switch against its float64 statement: values, and gradients of all parameters and inputs.

Error is max|a - b| / max|b| of an array. Measured in float32: values 4e-7, gradients 3.4e-6 against finite differences.

Seen to fail with all that `test_goldens.py` lists but the last and the eps on H_pre, and with each of these, which only
the statements see: H_res transposed (GR free, mHC paper); H_res computed and never applied; no 1/n in GR's free H_res;
the static term doubled; top_k of the lowest; gate_input=last from the first stream; HC's A_r not transposed; its static
part inside the tanh; its s_alpha and s_beta swapped; no 2 in the paper form's H_post; Sinkhorn rows first and columns
last, with and without a transposition; the final norm's eps without its n²; pre-norm writing 2 y.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grlab.residual import build
from tests.residual import functional, statements
from tests.residual.functional import error

B, T, N, D, R = 2, 2, 3, 5, 4
# Larger than in use, so that a misplaced eps, or one that is scaled otherwise, is seen.
EPS = 1e-2

GR = [
    {},
    {"streams": 2},
    {"read": "scalar"},
    {"write": "channel"},
    {"gates": "static"},
    {"gates": "static", "read": "scalar", "write": "channel"},
    {"gate": "tanh"},
    {"gate": "tanh", "gates": "static"},
    {"gate_range": 2},
    {"gate_range": 2, "read": "scalar", "gates": "static"},
    {"mix": "free"},
    {"mix": "sinkhorn"},
    {"norm": "shared_gain"},
    {"norm": "joint"},
    {"gate_input": "last"},
    {"gate_input": "pooled"},
    {"gate_input": "last", "mix": "free", "write": "channel"},
    {"gate_input": "pooled", "mix": "sinkhorn", "read": "scalar"},
    {"static_term": True},
    {"static_term": True, "read": "scalar", "write": "channel"},
    {"top_k": 2},
    {"top_k": 1, "read": "scalar", "gates": "static"},
    {"read": "scalar", "write": "channel", "gate": "tanh", "mix": "free", "norm": "joint", "gate_input": "pooled",
     "static_term": True, "top_k": 2},
]  # fmt: skip
HC = [{}, {"tanh": False}, {"dynamic": False}, {"streams": 2}]
# At few iterations the columns are still far from their sum, so that the order of the normalisations shows (and the
# unrolled loop compiles sooner; 20 are in the first row and in the goldens).
MHC = [{}, {"form": "deepseek_v4", "iterations": 3}]
MHC += [{"dynamic": False, "form": form, "iterations": 2} for form in ("paper", "deepseek_v4")]
CASES = [("prenorm", {})] + [(kind, s) for kind, rows in (("gr", GR), ("hc", HC), ("mhc", MHC)) for s in rows]


def draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A float32 value for a parameter, large enough for gates far from their centre and maps far from symmetric."""
    v = rng.standard_normal(shape)
    leaf = name.split(".")[-1]
    if leaf.startswith(("w_", "phi_", "head_phi")):
        v = 3 * v / np.sqrt(shape[0])
    elif leaf.startswith(("alpha_", "head_alpha", "s_", "lam_")):
        v = 0.7 + 0.2 * v
    return v.astype(np.float32)


def statement(kind: str, switches: dict):
    """What a row should compute: a function of {(part, name): value} -> x, the new stream, the model's end."""
    site, end = getattr(statements, kind), getattr(statements, f"{kind}_collapse")
    switches = {k: v for k, v in switches.items() if k != "streams"} | {"eps": EPS}
    # HC's and pre-norm's ends have no switches, mHC's has its form; GR's is a read, with all of them.
    of_end = {k: v for k, v in switches.items() if kind == "gr" or k == "eps" or (kind == "mhc" and k == "form")}

    def run(at):
        parts = {part: {k: v for (p, k), v in at.items() if p == part} for part in ("site", "end", "in")}
        stream, y = parts["in"]["stream"], parts["in"]["y"]
        final = {k.removeprefix("final."): v for k, v in parts["end"].items()}
        return *site(parts["site"], stream, y, **switches), end(final, stream, **of_end)

    return run


def name_row(value) -> str:
    return value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()) or "default"


@pytest.mark.parametrize("kind, switches", CASES, ids=name_row)
def test_values_and_gradients(kind, switches):
    rng = np.random.default_rng(0)
    n = switches.get("streams", N)
    fields = {"kind": kind, **switches} | ({} if kind == "prenorm" else {"streams": n})
    fields |= {"rank": R} if kind == "gr" else {}
    key = jax.random.key(0)
    model = build(fields, width=D, layers=2, key=key, norm_eps=EPS, compute_dtype="float32")
    site = model.site(1, key)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    stream = normal(B, T, D) if kind == "prenorm" else normal(B, T, n, D) * np.geomspace(0.5, 2, n)[:, None]
    at = {("in", "stream"): stream.astype(np.float32), ("in", "y"): normal(B, T, D)}
    for part, module in (("site", site), ("end", model)):
        at |= {(part, name): draw(name, v.shape, rng) for name, v in functional.parameters(module).items()}
    cotangents = normal(B, T, D), normal(*stream.shape), normal(B, T, D)

    def ours(at):
        parts = {part: {k: v for (p, k), v in at.items() if p == part} for part in ("site", "end", "in")}
        stream, y = parts["in"]["stream"], parts["in"]["y"]
        connection = functional.with_parameters(site, parts["site"])
        x, gates = connection.read(stream)
        new = connection.write(stream, y, gates)
        out = x, new, functional.with_parameters(model, parts["end"]).collapse(stream)
        return sum((a * c).sum() for a, c in zip(out, cotangents, strict=True)), out

    copies = at["in", "y"] if kind == "prenorm" else np.stack([at["in", "y"]] * n, axis=-2)
    np.testing.assert_array_equal(model.expand(jnp.asarray(at["in", "y"])), copies)  # unscaled
    theirs = statement(kind, switches)
    at_64 = {k: v.astype(np.float64) for k, v in at.items()}
    (_, out), gradient = functional.compiled(jax.value_and_grad(ours, has_aux=True))(at)
    for name, a, b in zip(("x", "stream", "collapse"), out, theirs(at_64), strict=True):
        assert error(a, b) < 2e-6, name

    def scalar(at):
        return sum((a * c).sum() for a, c in zip(theirs(at), cotangents, strict=True))

    wanted = statements.finite_differences(scalar, at_64)
    assert all(np.abs(v).max() > 1e-3 for v in wanted.values()), "a parameter that changes nothing tests nothing"
    errors = {k: error(gradient[k], wanted[k]) for k in at}
    assert max(errors.values()) < 1e-5, errors  # measured: 3.4e-6, HC's s_alpha, a sum that cancels
