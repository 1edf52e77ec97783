"""A module of parameters as a function of them: what lets a test hold it against a statement or a golden by name."""

import os
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from grlab.params import Fixed


def name_of(path: tuple) -> str:
    """The name in a statement or a golden of the parameter at `path`."""
    return ".".join(map(str, path))


def parameters(module: nnx.Module) -> dict[str, jax.Array]:
    """Every parameter of `module` that is trained, by name."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {name_of(path): variable[...] for path, variable in flat if not isinstance(variable, Fixed)}


def with_parameters(module: nnx.Module, values: Mapping[str, jax.Array]) -> nnx.Module:
    """A copy of `module` with the parameters `values`, which must name each of them, at its shape; may be traced."""
    shapes = {k: v.shape for k, v in parameters(module).items()}
    assert {k: jnp.shape(v) for k, v in values.items()} == shapes
    graph, state = nnx.split(module)
    flat = {path: v for path, v in nnx.to_flat_state(state)}
    for path, v in flat.items():
        if name_of(path) in values:
            flat[path] = v.replace(jnp.asarray(values[name_of(path)], v.dtype))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def compiled(f: Callable) -> Callable:
    """f under jit, compiled without optimisation, since it runs once, but by the emitters of a run: its rounding."""
    options = {"xla_backend_optimization_level": 0}
    if "xla_cpu_use_fusion_emitters" in os.environ["XLA_FLAGS"]:
        options["xla_cpu_use_fusion_emitters"] = True
    return jax.jit(f, compiler_options=options)


def error(a, b) -> float:
    """max|a - b| / max|b|, in float64."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / np.abs(b).max())
