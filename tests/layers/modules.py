"""Layers by themselves, and how they are held against float64 statements and against their own documents."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from grlab import config as configs
from tests import rows
from tests.residual.functional import compiled, error, parameters, with_parameters
from tests.residual.statements import finite_differences

# Of max|a - b| / max|b| of an array, float32 against float64. Measured: at most 3e-7 and 7e-7.
VALUES, GRADIENTS = 1e-6, 2e-6


def build(of: type, *overrides: str, std: float = 0.3):
    """(a layer of the scale tiny_hybrid, its config): the parameters are `std` away from their start, so that gains,
    biases and filters do something."""
    config = configs.load("configs/prenorm.py:tiny_hybrid", overrides).model
    dtype = jnp.dtype(config.compute_dtype)
    module = of(config, dtype, lambda name, fan_in, fan_out, std: std, jax.random.key(0))
    rows.randomise(module, std)
    return module, config


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    """N(0, 1) in float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def documents(*lengths: Sequence[int]) -> np.ndarray:
    """`documents_BxT` of sequences whose documents have these lengths."""
    return np.stack([np.repeat(np.arange(len(of)), of) for of in lengths])


def by_documents(f: Callable, x_BxTx_: np.ndarray, *lengths: Sequence[int]) -> np.ndarray:
    """f(document [1, T, ..]) of each document by itself, put together as they were packed."""
    found = []
    for x_Tx_, of in zip(x_BxTx_, lengths, strict=True):
        found.append(np.concatenate([f(part[None])[0] for part in np.split(x_Tx_, np.cumsum(of)[:-1])]))
    return np.stack(found)


def check_against(stated: Callable, run: Callable, module, x: np.ndarray, constant: Sequence[str] = ()):
    """run(module, x) against stated(parameters, x) in float64, and the gradients of Σ y · cotangent of x and of every
    parameter against finite differences of it. Of what `constant` names, "x" or a parameter, the gradient is zero."""
    at = {"x": x} | {name: np.asarray(v) for name, v in parameters(module).items()}

    def apart(at):
        return {name: v for name, v in at.items() if name != "x"}, at["x"]

    at_64 = {name: v.astype(np.float64) for name, v in at.items()}
    wanted = stated(*apart(at_64))
    cotangent = draw(*np.shape(wanted), seed=1)

    def ours(at):
        p, x = apart(at)
        y = run(with_parameters(module, p), x)
        return jnp.sum(y * cotangent), y

    (_, y), gradient = compiled(jax.value_and_grad(ours, has_aux=True))(at)
    assert error(y, wanted) < VALUES, error(y, wanted)
    varied = {name: v for name, v in at_64.items() if name not in constant}
    slopes = finite_differences(lambda some: np.sum(stated(*apart(at_64 | some)) * cotangent), varied)
    assert all(np.abs(v).max() > 1e-3 for v in slopes.values()), "a parameter that changes nothing tests nothing"
    errors = {name: error(gradient[name], slopes[name]) for name in varied}
    assert max(errors.values()) < GRADIENTS, errors
    for name in constant:
        np.testing.assert_array_equal(gradient[name], 0)
