"""A module of parameters as a function of them: what lets a test hold it against a statement or a golden by name."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

# One place knows where the modules keep what the statements call by the name on the right.
NAMES = {"final_norm.gain": "final_gain"}


def name_of(path: tuple) -> str:
    """The name in a statement or a golden of the parameter at `path`."""
    name = ".".join(map(str, path))
    return NAMES.get(name, name)


def parameters(module: nnx.Module) -> dict[str, jax.Array]:
    """Every parameter of `module` by name."""
    return {name_of(path): variable[...] for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))}


def with_parameters(module: nnx.Module, values: Mapping[str, jax.Array]) -> nnx.Module:
    """A copy of `module` with the parameters `values`, which must name each of them, at its shape; may be traced."""
    shapes = {k: v.shape for k, v in parameters(module).items()}
    assert {k: jnp.shape(v) for k, v in values.items()} == shapes
    graph, state = nnx.split(module)
    flat = [(path, v.replace(jnp.asarray(values[name_of(path)], v.dtype))) for path, v in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def compiled(f: Callable) -> Callable:
    """f under jit, compiled without optimisation: these functions run once, on a hundred numbers."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


def error(a, b) -> float:
    """max|a - b| / max|b|, in float64."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / np.abs(b).max())
