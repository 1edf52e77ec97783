"""What a layer may know of the mesh of devices that it is traced for."""

import contextlib
import contextvars

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BATCH_AXES = ("data", "fsdp")  # a batch is split over both; parameters over fsdp alone
BY_BATCH = PartitionSpec(BATCH_AXES)

_MESH: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)


@contextlib.contextmanager
def traced_for(mesh: Mesh):
    """Within it, layers are traced for the devices of `mesh`."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def current() -> Mesh | None:
    """The mesh, or None where there is one device: nothing is split then."""
    mesh = _MESH.get()
    return None if mesh is None or mesh.size == 1 else mesh


def split_by_batch(tree):
    """The arrays of `tree`, the first axis split as the batch and the others whole.

    What is not told so XLA may split as the parameters are: by the width, and the batch over fewer devices.
    """
    mesh = current()
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, BY_BATCH))


def with_whole_rows(w_RxD: jax.Array) -> jax.Array:
    """A table to look rows up in, each row on one device: of split rows XLA would make whole ones by way of all."""
    mesh = current()
    if mesh is None:
        return w_RxD
    spec = PartitionSpec(PartitionSpec.UNCONSTRAINED, None)
    return jax.lax.with_sharding_constraint(w_RxD, NamedSharding(mesh, spec))
