"""The mesh, and where each array lies on it."""

import math

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grlab import errors

BATCH_AXES = ("data", "fsdp")  # a batch is split over both; parameters over fsdp alone


def make_mesh(sizes) -> Mesh:
    """The mesh over all devices with the axes of `config.mesh`; an axis of −1 takes the devices that are left.

    Raises UsageError when the sizes do not multiply to the number of devices, or for more than one process.
    """
    if jax.process_count() > 1:
        raise errors.UsageError("processes", jax.process_count(), "a run is one process so far: start it once")
    sizes = dict(sizes)
    devices = jax.device_count()
    free = [axis for axis, size in sizes.items() if size == -1]
    taken = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1:
        raise errors.UsageError(f"config.mesh.{free[1]}", -1, f"only one axis can be -1: mesh.{free[0]} is, too")
    if devices % taken or (not free and taken != devices):
        shape = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise errors.UsageError("config.mesh", shape, f"must multiply to the {devices} devices there are")
    if free:
        sizes[free[0]] = devices // taken
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def check_batch(batch_size: int, accumulate: int, mesh: Mesh, field: str = "config.batch_size") -> None:
    """Raises UsageError unless each of the `accumulate` parts of a batch splits evenly over the mesh."""
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if (batch_size // accumulate) % ways:
        remedy = f"must be a multiple of mesh.data · mesh.fsdp = {ways}"
        if accumulate > 1:
            parts = math.gcd(accumulate, batch_size // ways) if batch_size % ways == 0 else 1
            remedy = f"in {accumulate} parts each {remedy}: try --config.optim.accumulate={parts}"
        raise errors.UsageError(field, batch_size, remedy)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def shardings(tree, mesh: Mesh, rules):
    """The sharding of each array of `tree`, the parameters or an optimizer's state.

    The logical axes of a parameter, or of a moment of it, are mapped to mesh axes by `config.rules`. An axis without a
    rule, or that its mesh axis does not divide, is kept whole; so is the axis of stacked layers, which has no name, and
    every array that is not a parameter's.
    """

    if rules.get("streams"):
        raise errors.UsageError("config.rules.streams", rules["streams"], "the axis of the streams is never split")
    for name, axis in rules.items():
        errors.one_of(f"config.rules.{name}", axis, ["", *mesh.shape])

    def of_param(variable: nnx.Param) -> NamedSharding:
        shape = variable.shape
        names = ("",) * (len(shape) - len(variable.axes)) + tuple(variable.axes)
        spec = []
        for size, name in zip(shape, names, strict=True):
            axis = rules.get(name, "") or None
            fits = axis is not None and axis not in spec and size % mesh.shape[axis] == 0
            spec.append(axis if fits else None)
        return NamedSharding(mesh, PartitionSpec(*spec))

    def of(leaf):  # a parameter that an optimizer leaves to another one is there without a value
        if isinstance(leaf, nnx.Variable):
            return jax.tree.map(lambda _: of_param(leaf), leaf)
        return replicated(mesh)

    return jax.tree.map(of, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """The host's batch as global arrays split over the batch axes; every process holds the same batch."""
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    return {k: jax.make_array_from_callback(v.shape, sharding, lambda i, v=v: v[i]) for k, v in batch.items()}
