"""Initial values, as numbers: what the statements cannot see, since they draw every parameter anew.

From the papers, and where they give none the choice that the module states. Stream starts are in `test_statements.py`.
"""

import jax
import numpy as np
import pytest

from grlab import residual
from tests.residual import functional

# kind and switches, the sublayer k, and parameters of its site.
VALUES = [
    ({"kind": "gr", "streams": 3}, 4, {"gain": 0.0}),
    (
        {"kind": "gr", "streams": 3, "gates": "static", "write": "channel"},
        4,  # home: stream 1
        {
            "b_read": np.repeat([[-1.0], [1.0], [-1.0]], 64, axis=1),
            "b_write": np.repeat([[-1.0], [1.0], [-1.0]], 64, 1),
        },
    ),
    ({"kind": "gr", "streams": 3, "static_term": True, "read": "scalar"}, 5, {"b_read": [-1, -1, 1]}),
    ({"kind": "gr", "gate": "tanh", "mix": "free"}, 0, {"lam_read": 0.01, "lam_write": 0.01, "lam_res": 0.01}),
    ({"kind": "gr", "streams": 2, "mix": "sinkhorn"}, 0, {"alpha_res": 0.01, "b_res": [[3, -3], [-3, 3]]}),
    ({"kind": "gr", "mix": "permutations"}, 0, {"alpha_res": 0.01, "b_res": [0] + [-8] * 23}),
    (
        {"kind": "hc", "streams": 3},
        5,
        {"a_m": [0, 0, 1], "a_r": np.eye(3), "b": 1.0, "w_beta": 0.0, "w_m": 0.0, "w_r": 0.0, "s_alpha": 0.01}
        | {"s_beta": 0.01, "dyn_gain": 0.0, "norm.gain": 0.0},
    ),
    (
        {"kind": "mhc", "streams": 2},
        3,
        {"b_pre": [-3, 3], "b_post": 0.0, "b_res": [[3, -3], [-3, 3]], "alpha_pre": 0.01, "alpha_post": 0.01}
        | {"alpha_res": 0.01},
    ),
    ({"kind": "mhc", "form": "lite"}, 0, {"b_pre": [3, -3, -3, -3], "b_res": [0] + [-8] * 23}),
    ({"kind": "altup", "streams": 3}, 1, {"p": np.eye(3), "g": 1.0}),
    ({"kind": "width_only", "streams": 3}, 4, {"h": [0, 1, 0]}),
    ({"kind": "width_only", "read_init": "mean"}, 4, {"h": 0.25}),
    ({"kind": "attnres"}, 1, {"attend.q": 0.0, "attend.source_gain": 0.0, "attend.norm.gain": 0.0}),
    ({"kind": "scalars"}, 0, {"a": 1.0, "b": 1.0, "c": 0.0}),
    ({"kind": "layerscale"}, 0, {"lam": 0.1}),
    ({"kind": "rezero"}, 0, {"a": 0.0}),
    ({"kind": "postnorm"}, 0, {"norm.gain": 0.0, "norm.bias": 0.0}),
]
SPREADS = [
    ({"kind": "gr", "rank": 16}, {"w_down": 0.02, "w_up": 0.02, "w_write": 0.02}),
    ({"kind": "gr", "rank": 16, "write": "channel", "mix": "free"}, {"w_write_up": 0.02, "w_res": 0.02}),
    ({"kind": "gr", "rank": 16, "init_std": 0.1}, {"w_down": 0.1, "w_up": 0.1, "w_write": 0.1}),
    ({"kind": "mhc"}, {"phi_pre": 0.02, "phi_post": 0.02, "phi_res": 0.02}),
    ({"kind": "prenorm", "gated_norm": 16}, {"norm.w_down": 0.02, "norm.w_up": 0.02}),
]


# kind and switches, and parameters of the stream's end.
ENDS = [
    ({"kind": "mhc", "form": "deepseek_v4"}, {"head_alpha": 1.0, "head_b": 0.0}, {"phi_head": 0.02}),
    ({"kind": "gr", "rank": 16}, {"final.gain": 0.0}, {"final.w_down": 0.02, "final.w_up": 0.02}),
    # Its place among the sublayers is after the eighth, counted from 0: stream 2 of 3 is home.
    ({"kind": "gr", "streams": 3, "gates": "static", "read": "scalar"}, {"final.b_read": [-1, -1, 1]}, {}),
    ({"kind": "attnres"}, {"final.q": 0.0, "final.source_gain": 0.0}, {}),
    ({"kind": "hc"}, {"final_norm.gain": 0.0}, {}),
]


def site(fields: dict, k: int):
    key = jax.random.key(0)
    return functional.parameters(residual.build(fields, width=64, layers=4, key=key).site(k, key))


@pytest.mark.parametrize("fields, k, values", VALUES)
def test_values(fields, k, values):
    parameters = site(fields, k)
    for name, value in values.items():
        np.testing.assert_allclose(parameters[name], np.broadcast_to(value, parameters[name].shape), err_msg=name)


@pytest.mark.parametrize("fields, stds", SPREADS)
def test_spreads(fields, stds):
    parameters = site(fields, 0)
    for name, std in stds.items():
        assert float(parameters[name].std()) == pytest.approx(std, rel=0.1), name
        assert abs(float(parameters[name].mean())) < 0.1 * std, name


@pytest.mark.parametrize("fields, values, stds", ENDS)
def test_ends(fields, values, stds):
    parameters = functional.parameters(residual.build(fields, width=64, layers=4, key=jax.random.key(0)))
    for name, value in values.items():
        np.testing.assert_allclose(parameters[name], np.broadcast_to(value, parameters[name].shape), err_msg=name)
    for name, std in stds.items():
        assert float(parameters[name].std()) == pytest.approx(std, rel=0.1), name
