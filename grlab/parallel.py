"""The mesh, and where each array lies on it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grlab import errors
from grlab.ops.mesh import BATCH_AXES, BY_BATCH, SEEDS_AXIS


def make_mesh(sizes, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh with the axes of `config.mesh` over all devices, or over those given.

    An axis of −1 takes the devices that are left.
    Raises UsageError when the sizes do not multiply to the number of devices.
    """
    sizes = dict(sizes)
    count = jax.device_count() if devices is None else len(devices)
    free = [axis for axis, size in sizes.items() if size == -1]
    taken = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1:
        raise errors.UsageError(f"config.mesh.{free[1]}", -1, f"only one axis can be -1: mesh.{free[0]} is, too")
    if count % taken or (not free and taken != count):
        shape = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise errors.UsageError("config.mesh", shape, f"must multiply to the {count} devices there are")
    if free:
        sizes[free[0]] = count // taken
    axes = sorted(sizes, key=lambda axis: axis != SEEDS_AXIS)  # outermost: seeds have nothing to send each other
    # An axis may take a part of a row of chips: else 16 × 16 of the 8 × 8 × 4 chips of a pod would be refused.
    shape = tuple(sizes[axis] for axis in axes)
    grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


def check_batch(batch_size: int, accumulate: int, mesh: Mesh, field: str = "config.batch_size") -> None:
    """Raises UsageError unless each of the `accumulate` parts of a batch splits evenly over the mesh."""
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if (batch_size // accumulate) % ways:
        remedy = f"must be a multiple of mesh.data · mesh.fsdp = {ways}"
        if accumulate > 1:
            parts = math.gcd(accumulate, batch_size // ways) if batch_size % ways == 0 else 1
            remedy = f"in {accumulate} parts each {remedy}: try --config.optim.accumulate={parts}"
        raise errors.UsageError(field, batch_size, remedy)


def check_seeds(seeds: Sequence[int], mesh: Mesh) -> None:
    """Raises UsageError unless each group of devices along the axis of the seeds has as many of them."""
    groups = mesh.shape[SEEDS_AXIS]
    if len(seeds) % groups:
        remedy = f"must divide the number of seeds to train, {len(seeds)} ({', '.join(map(str, seeds))})"
        raise errors.UsageError(f"config.mesh.{SEEDS_AXIS}", groups, remedy + ": 1 always does")


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


def of_seeds(shardings):
    """The shardings of arrays that are stacked along a first axis, that of the seeds."""
    return jax.tree.map(lambda s: NamedSharding(s.mesh, PartitionSpec(SEEDS_AXIS, *s.spec)), shardings)


class Share(NamedTuple):
    """The rows that one process reads of a batch of `size`, in order."""

    size: int
    rows: np.ndarray


def share_of(batch_size: int, mesh: Mesh) -> Share:
    """What this process need read of a batch: the rows that its devices hold."""
    indices = NamedSharding(mesh, BY_BATCH).addressable_devices_indices_map((batch_size,)).values()
    return Share(batch_size, np.unique(np.concatenate([np.arange(batch_size)[rows] for (rows,) in indices])))


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh, share: Share | None = None) -> dict[str, jax.Array]:
    """The host's batch as global arrays split over the batch axes: the whole batch, or the rows of `share` of it."""
    sharding = NamedSharding(mesh, BY_BATCH)

    def put(x):
        size, rows = share or Share(len(x), np.arange(len(x)))

        def held(index):  # the rows of a device are neighbours in the batch, and so they are in the share
            start, stop, _ = index[0].indices(size)
            first = np.searchsorted(rows, start)
            return x[first : first + stop - start]

        return jax.make_array_from_callback((size, *x.shape[1:]), sharding, held)

    return jax.tree.map(put, batch)


def put_batches(batches: Sequence[dict[str, np.ndarray]], mesh: Mesh) -> dict[str, jax.Array]:
    """The batches of all seeds, stacked along a first axis; for a run of one process, which has all of each."""
    sharding = of_seeds(NamedSharding(mesh, BY_BATCH))
    return jax.tree.map(lambda *xs: jax.device_put(np.stack(xs), sharding), *batches)
