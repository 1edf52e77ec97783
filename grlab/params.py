"""How parameters are made: each from a key of its own path, each with its axes and its groups stated.

A parameter's initial value depends on the seed and on the names on its path, not on how many others were made before
it: two rows share the initial values of everything they share.
"""

import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx


def fold(key: jax.Array, name: str) -> jax.Array:
    """The key of the child called `name`."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)


class Fixed(nnx.Param):
    """A value that belongs to a module and is not trained, such as which stream is a site's home: no gradient."""

    def __getitem__(self, key):
        return jax.lax.stop_gradient(super().__getitem__(key))


def param(
    value: jax.Array,
    axes: tuple[str, ...],
    *,
    decay: bool,
    muon: tuple[int, int] | None = None,
    share: float = 1.0,
    of: type[nnx.Param] = nnx.Param,
) -> nnx.Param:
    """A float32 parameter.

    Args:
      value: its initial value.
      axes: a logical name for each of its axes, mapped to the mesh by `config.rules`.
      decay: whether weight decay applies.
      muon: the input and the output axis, counted from the end, of a matrix that Muon orthogonalises; every other axis
        counts matrices. None: AdamW, whatever the optimizer.
      share: of its numbers, how many a token makes use of: fewer than all of experts and of tables.
      of: the class of the variable.
    """
    if len(axes) != value.ndim:
        raise AssertionError(f"axes {axes} do not name the {value.ndim} axes of the value")
    return of(jnp.asarray(value, jnp.float32), axes=axes, decay=decay, muon=muon, share=share)


def normal(
    key: jax.Array,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    std: float,
    muon: tuple[int, int] | None = None,
    *,
    decay: bool = True,
    share: float = 1.0,
) -> nnx.Param:
    """A matrix drawn from N(0, std²), in the weight-decay group unless `decay` is false."""
    return param(std * jax.random.normal(fold(key, name), shape), axes, decay=decay, muon=muon, share=share)


def constant(value, axes: tuple[str, ...] = ()) -> nnx.Param:
    """A gain, bias or static map that starts at `value`, outside the weight-decay group."""
    return param(jnp.asarray(value, jnp.float32), axes, decay=False)


def fixed(value, axes: tuple[str, ...] = ()) -> Fixed:
    """A value that is not trained."""
    return param(jnp.asarray(value, jnp.float32), axes, decay=False, of=Fixed)


def variables(params: nnx.State) -> list[nnx.Param]:
    """The parameters in the order of `jax.tree.leaves`, each with its `axes` and `decay`."""
    return jax.tree.leaves(params, is_leaf=lambda v: isinstance(v, nnx.Variable))


def count(params: nnx.State) -> int:
    """How many numbers are trained."""
    return sum(v.size for v in variables(params) if not isinstance(v, Fixed))


def count_active(params: nnx.State) -> int:
    """How many of them a token makes use of: all but the experts it does not go to and the n-grams it does not have.

    The embedding counts as a whole, as it does where models are named by such a number (arXiv 2505.09388).
    """
    return round(sum(v.size * v.share for v in variables(params) if not isinstance(v, Fixed)))


def map_params(f: Callable[[nnx.Param], object], params: nnx.State) -> nnx.State:
    """A tree of the structure of `params` with f(parameter) for each array."""
    return jax.tree.unflatten(jax.tree.structure(params), [f(v) for v in variables(params)])
