"""The TPU chips that a run can be planned for."""

from typing import NamedTuple

# What lets XLA's TPU compiler be used without a TPU, set before JAX is imported.
COMPILER_ENV = {
    "JAX_PLATFORMS": "cpu",  # a TPU that is there stays free
    "TPU_SKIP_MDS_QUERY": "1",  # libtpu asks nobody which TPU this machine has
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",  # and is told of one, or it complains; the topology is asked for by name
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two processes at a time
}


class Chip(NamedTuple):
    """What one chip has."""

    peak_flops: float  # FLOP/s in bfloat16
    hbm_bytes: float
    hbm_bandwidth: float  # bytes/s
    ici_bandwidth: float  # bytes/s that it sends to its neighbours over all links, and as much that it receives
    largest: tuple[int, ...]  # chips in each direction, of the largest slice
    options: dict[str, str] = {}  # of the compiler's topology
    slices: tuple[str, int] = ("", 1)  # what Google Cloud calls a slice: this, and a number: of so many a chip

    def wraps(self, sizes: tuple[int, ...]) -> tuple[bool, ...]:
        """Whether the last chip in each direction is wired to the first: the compiler is not told so by the shape.

        In three directions where all are whole cubes of 4 (docs.cloud.google.com/tpu/docs/v4), in two those of 16
        (jax-ml.github.io/scaling-book, "TPUs").
        """
        if len(sizes) == 3:
            return (all(n % 4 == 0 for n in sizes),) * 3
        return (*(n == 16 for n in sizes), False)


_GIB = 2**30
# docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}, "System architecture" and "Configurations". Their interconnect
# bandwidth is of both directions; half of it is here. For v4 they have none: 6 links of 50 GB/s are from arXiv
# 2304.01433, and with them the documented all-reduce of a pod, 1.1 PB/s for 4096 chips, is 0.9 of the links', as it is
# 1.0 for v5e and v6e. The capacities are binary: what XLA may use of the 16 GB of a v5e is 15.75 GiB.
CHIPS = {
    # Without megacore each core of a v4 is a device.
    "v4": Chip(275e12, 32 * _GIB, 1200e9, 300e9, (16, 16, 16), {"chip_config_name": "megacore"}, slices=("v4", 2)),
    "v5e": Chip(197e12, 16 * _GIB, 819e9, 200e9, (16, 16), slices=("v5litepod", 1)),
    "v5p": Chip(459e12, 95 * _GIB, 2765e9, 600e9, (16, 16, 24), slices=("v5p", 2)),
    "v6e": Chip(918e12, 32 * _GIB, 1638e9, 400e9, (16, 16), slices=("v6e", 1)),
}
