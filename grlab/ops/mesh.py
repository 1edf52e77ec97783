"""What a layer may know of the mesh of devices that it is traced for."""

import contextlib
import contextvars

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SEEDS_AXIS = "seeds"  # what is traced under a vmap over seeds knows nothing of it
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


def device_kind() -> str:
    """What layers are traced for, such as "TPU v4": the mesh's devices, or this process's where there is no mesh."""
    mesh = _MESH.get()
    return (jax.devices()[0] if mesh is None else mesh.devices.flat[0]).device_kind


def split_by_batch(tree):
    """The arrays of `tree`, the first axis split as the batch and the others whole.

    What is not told so XLA may split as the parameters are: by the width, and the batch over fewer devices.
    """
    mesh = current()
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, BY_BATCH))


def whole(tree):
    """The arrays of `tree`, and their gradients, whole on each device.

    Of a small array of parameters that go through many small operations XLA splits each, and sends single numbers.
    """
    mesh = current()
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


def with_whole_rows(w_RxD: jax.Array) -> jax.Array:
    """A table to look rows up in, each row on one device: of split rows XLA would make whole ones by way of all."""
    mesh = current()
    if mesh is None:
        return w_RxD
    spec = PartitionSpec(PartitionSpec.UNCONSTRAINED, None)
    return jax.lax.with_sharding_constraint(w_RxD, NamedSharding(mesh, spec))


def on_each_device(f, of_batch: tuple, whole: tuple):
    """f(*of_batch, *whole) where each device has its part of the batch: the first axis of `of_batch` and of the result.

    For what XLA would split otherwise, and move activations for it. `whole` are weights; each device has all of them.
    """
    mesh = current()
    if mesh is None:
        return f(*of_batch, *whole)
    specs = (BY_BATCH,) * len(of_batch) + (PartitionSpec(),) * len(whole)
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=BY_BATCH, check_vma=False)(*of_batch, *whole)
