"""The mixture of experts against a float64 statement that goes token by token, and what its router's losses move.

Seen to fail: weights not made to sum to 1, or constants; σ for the router's softmax; the shared expert not gated; the
rows not put back; the gradient of a permutation by the permutation; SiLU of `up`; the balance without E, of shares of
the choices, and of the chosen probabilities alone; the entropy's sign; the busiest expert not by the mean; a router in
bfloat16; an expert scaled by its index, one that is run unchosen.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grlab.layers.moe import MoE
from tests.layers import modules
from tests.residual.functional import error, parameters, with_parameters
from tests.residual.statements import sigmoid, silu, softmax

EXPERTS = ("gate", "up", "down")
SMALL = ("model.width=4", "model.moe.ffn=3")
CASES = {
    "2 of 4, and a shared one": (*SMALL, "model.moe.experts=4", "model.moe.top_k=2", "model.moe.shared=5"),
    "3 of 5": (*SMALL, "model.moe.experts=5", "model.moe.top_k=3", "model.moe.shared=0"),
    "all": (*SMALL, "model.moe.experts=3", "model.moe.top_k=3", "model.moe.shared=0"),
}
STATISTICS = ("balance", "router_entropy", "busiest_expert")


def swiglu(x_D, gate_DxF, up_DxF, down_FxD):
    return (silu(x_D @ gate_DxF) * (x_D @ up_DxF)) @ down_FxD


def stated(p, x_BxTxD, top_k):
    """(y, the statistics): each token's experts in turn."""
    x_SxD = x_BxTxD.reshape(-1, x_BxTxD.shape[-1])
    probabilities_SxE = softmax(x_SxD @ p["router"])
    experts = probabilities_SxE.shape[1]
    y_SxD, chosen_E = np.zeros_like(x_SxD), np.zeros(experts)
    for s, x_D in enumerate(x_SxD):
        best = np.argsort(-probabilities_SxE[s])[:top_k]
        for e in best:
            weight = probabilities_SxE[s, e] / probabilities_SxE[s, best].sum()
            y_SxD[s] += weight * swiglu(x_D, *(p[name][e] for name in EXPERTS))
            chosen_E[e] += 1
        if "shared_gate" in p:
            y_SxD[s] += sigmoid(x_D @ p["shared_gate"]) * swiglu(x_D, *(p[f"shared.{name}"] for name in EXPERTS))
    statistics = {
        "balance": experts * np.sum(chosen_E / len(x_SxD) * probabilities_SxE.mean(axis=0)),
        "router_entropy": -np.mean(np.sum(probabilities_SxE * np.log(probabilities_SxE), axis=1)),
        "busiest_expert": chosen_E.max() / chosen_E.mean(),
    }
    return y_SxD.reshape(x_BxTxD.shape), statistics


@pytest.mark.parametrize("case", CASES)
def test_values(case):
    """So many tokens that an expert has several blocks of them."""
    module, config = modules.build(MoE, *CASES[case])
    x_BxTxD = modules.draw(2, 60, 4)
    y, statistics = jax.jit(module)(x_BxTxD)
    p = {name: np.asarray(v, np.float64) for name, v in parameters(module).items()}
    wanted, of_router = stated(p, x_BxTxD.astype(np.float64), config.moe.top_k)
    assert error(y, wanted) < 1e-6
    assert set(statistics) == set(STATISTICS)
    for name in STATISTICS:
        np.testing.assert_allclose(statistics[name], of_router[name], rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_gradients(case):
    module, config = modules.build(MoE, *CASES[case])
    modules.check_against(
        lambda p, x: stated(p, x, config.moe.top_k)[0], lambda m, x: m(x)[0], module, modules.draw(2, 5, 4)
    )


@pytest.mark.parametrize("name", ["balance", "router_entropy"])
def test_gradients_of_the_routers_statistics(name):
    """In the balance the shares of the choices are constants: it moves the router by the probabilities alone."""
    module, config = modules.build(MoE, *CASES["2 of 4, and a shared one"])
    modules.check_against(
        lambda p, x: stated(p, x, config.moe.top_k)[1][name],
        lambda m, x: m(x)[1][name],
        module,
        modules.draw(2, 5, 4),
        constant=[other for other in parameters(module) if other != "router"],
    )


def test_balance_of_a_router_that_prefers_none():
    """K, the number of experts a token, whatever the choices; the entropy is the largest there is."""
    module, config = modules.build(MoE, *CASES["2 of 4, and a shared one"])
    module.router[...] = jnp.zeros_like(module.router[...])
    statistics = jax.jit(module)(modules.draw(2, 5, 4))[1]
    np.testing.assert_allclose(statistics["balance"], 2, rtol=1e-6)
    np.testing.assert_allclose(statistics["router_entropy"], np.log(4), rtol=1e-6)
    np.testing.assert_allclose(statistics["busiest_expert"], 2, rtol=1e-6)  # the first two, of equals


def test_an_expert_that_no_token_chooses_has_no_gradient():
    module, _ = modules.build(MoE, *CASES["2 of 4, and a shared one"])
    x_BxTxD = modules.draw(2, 5, 4)
    x_BxTxD[..., 0] = 1
    module.router[...] = module.router[...].at[0, 2].set(-100.0)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(with_parameters(module, p)(x_BxTxD)[0])))(parameters(module))
    for name in EXPERTS:
        of_each = np.abs(gradient[name]).max(axis=(1, 2))
        assert of_each[2] == 0 and (np.delete(of_each, 2) > 1e-3).all()


def test_the_order_of_the_experts_is_of_no_account():
    module, _ = modules.build(MoE, *CASES["2 of 4, and a shared one"])
    x_BxTxD, order = modules.draw(2, 30, 4), np.array([2, 0, 3, 1])
    p = parameters(module)
    reordered = p | {name: p[name][order] for name in EXPERTS} | {"router": p["router"][:, order]}
    run = jax.jit(lambda p: with_parameters(module, p)(x_BxTxD))
    (y, statistics), (other_y, others) = run(p), run(reordered)
    assert error(other_y, y) < 1e-6
    for name in STATISTICS:
        np.testing.assert_allclose(others[name], statistics[name], rtol=1e-6)


def test_in_bfloat16_the_router_is_float32():
    """The output is within a few roundings of one part in 2⁸; what the router does is the same."""
    case = CASES["2 of 4, and a shared one"]
    module, _ = modules.build(MoE, *case)
    low = with_parameters(modules.build(MoE, *case, "model.compute_dtype=bfloat16")[0], parameters(module))
    x_BxTxD = jnp.asarray(modules.draw(2, 60, 4), jnp.bfloat16)
    y, statistics = jax.jit(module)(x_BxTxD.astype(jnp.float32))
    low_y, of_low = jax.jit(low)(x_BxTxD)
    assert low_y.dtype == jnp.bfloat16
    difference = np.asarray(low_y, np.float32) - y
    assert 1e-3 < np.sqrt(np.mean(difference**2) / np.mean(y**2)) < 1e-2
    for name in STATISTICS:
        assert of_low[name].dtype == jnp.float32
        np.testing.assert_allclose(of_low[name], statistics[name], rtol=1e-6)
