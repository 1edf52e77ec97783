"""The processes of one run: how they find each other, and what they settle together.

Every process runs the same program on the same values; the first one alone writes the run directory and speaks.
Nothing is done by one process alone between two updates: what one of them knows travels with the next update.
"""

import contextlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grlab.errors import RunFailed, UsageError, first_line, positive

HEARTBEAT = 30  # seconds without a word from a process after which the others end


def start(coordinator: str | None, processes: int | None, process_id: int | None, wait: int) -> None:
    """Joins the other processes of this run, if there are any; call it before anything else of JAX.

    Given a coordinator ("host:port" of process 0), the number of processes and this one's number, it uses those. Given
    none, it asks what started the processes: Slurm's srun, Open MPI, a TPU pod, or a Kubernetes Job with indices (and
    the package `kubernetes`). `processes=1` alone keeps the process to itself whatever started it.

    It ends the process with status 1, and says whom it waited for, when they are not all there after `wait` seconds.
    Raises UsageError for an incomplete or impossible choice.
    """
    if processes == 1 and coordinator is None and process_id in (None, 0):
        return
    positive("--wait", wait)
    explicit = {"--coordinator": coordinator, "--processes": processes, "--process_id": process_id}
    if any(value is not None for value in explicit.values()):
        for name, value in explicit.items():
            if value is None:
                raise UsageError(
                    name, "", "give it, too: it goes with " + " and ".join(n for n in explicit if n != name)
                )
        positive("--processes", processes)
        if not 0 <= process_id < processes:
            raise UsageError("--process_id", process_id, f"must lie in 0 .. {processes - 1}")
        host, _, port = coordinator.rpartition(":")
        if not (host and port.isdigit() and 0 < int(port) < 2**16):
            raise UsageError("--coordinator", coordinator, "must be host:port, the same for every process")
        who = f"process {process_id} of {processes}"
        _join(who, coordinator, wait, coordinator, processes, process_id, cluster_detection_method="deactivate")
    elif (method := _started_by(os.environ)) is not None:
        # On a TPU that is no pod's, JAX finds no cluster and raises ValueError.
        with contextlib.suppress(ValueError) if method == "tpu" else contextlib.nullcontext():
            asked = None if method == "tpu" else method  # JAX tells the kinds of TPU clusters apart by itself
            gpus = _gpus_of_a_node(os.environ)
            who = f"a process started by {method}"
            _join(who, "the first one", wait, cluster_detection_method=asked, local_device_ids=gpus)


def _started_by(environment) -> str | None:
    """JAX's name for what started several processes of this run, or None where this is the only one."""
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return "slurm"
    if int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return "ompi"
    if "JOB_COMPLETION_INDEX" in environment and importlib.util.find_spec("kubernetes"):
        return "k8s"
    chips = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    return "tpu" if chips and importlib.util.find_spec("libtpu") else None


def _gpus_of_a_node(environment) -> list[int] | None:
    """The GPUs of the only task that Slurm has on a node, which are all of them: JAX would give it the first one."""
    tasks, nodes = (environment.get(f"SLURM_STEP_NUM_{of}") for of in ("TASKS", "NODES"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return list(range(len(visible.split(",")))) if visible and tasks is not None and tasks == nodes else None


def _join(who: str, coordinator: str, wait: int, *args, **kwargs) -> None:
    def give_up():
        remedy = (
            "are all of them started, each with an id of its own, and is that address open? --wait=SECONDS waits longer"
        )
        print(f"failed: {who}: waited {wait} s for the others at {coordinator}: {remedy}", file=sys.stderr, flush=True)
        os._exit(1)

    print(f"{who}: waits up to {wait} s for the others at {coordinator}", flush=True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, which a run saves its state at
    timer = threading.Timer(wait, give_up)  # JAX's own time-out ends the process with a page of C++
    timer.daemon = True
    timer.start()
    limits = {"initialization_timeout": wait + 60, "heartbeat_timeout_seconds": HEARTBEAT}
    try:
        jax.distributed.initialize(*args, **kwargs, **limits)
    except RuntimeError as e:
        raise RunFailed(f"{who}: could not join the others at {coordinator}: {first_line(e)}") from e
    finally:
        timer.cancel()


def several() -> bool:
    """Whether this run is of more than one process."""
    return jax.process_count() > 1


def first() -> bool:
    """Whether this is the process that writes and speaks."""
    return jax.process_index() == 0


def from_first(call: Callable[[], object]) -> object:
    """`call()` of the first process, for every one; its value is one that JSON has. What it raises, all raise."""
    if not several():
        return call()
    answer, error = {}, None
    if first():
        try:
            answer = {"value": call()}
        except (UsageError, RunFailed) as e:
            error = e
            answer = {"error": str(e)}
    text = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(text))))
    text = multihost_utils.broadcast_one_to_all(np.resize(text, size))
    answer = json.loads(bytes(np.asarray(text, np.uint8)))
    if "error" in answer:
        raise error or RunFailed(f"process 0: {answer['error']}")
    return answer["value"]


def anyone(flag: bool) -> bool:
    """Whether `flag` is true in any process; each of them must ask."""
    return flag if not several() else bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def check_alike(fields: Mapping[str, object]) -> None:
    """Raises UsageError in every process unless each of them has these values, of JSON, of the first one."""
    theirs, mine = from_first(lambda: fields), json.loads(json.dumps(fields))
    different = next((f for f in {**theirs, **mine} if theirs.get(f) != mine.get(f)), None)
    if not anyone(different is not None):
        return
    if different is None:
        raise UsageError("process", jax.process_index(), "another process says what it has otherwise: see there")
    remedy = f"the first process has {theirs.get(different)!r}: start all of them by the same command on the same files"
    raise UsageError(different, mine.get(different), remedy)


class Word:
    """A flag that travels with the updates: all processes learn of it at the same one, and none waits for it."""

    def __init__(self, mesh: Mesh):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._any = jax.jit(jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._shape = (mesh.size,)

    def send(self, flag: bool) -> jax.Array | bool:
        """Whether `flag` is true in any process: an array whose value may be on its way."""
        if not several():
            return flag
        mine = np.full(self._shape, flag)
        return self._any(jax.make_array_from_callback(self._shape, self._sharding, lambda index: mine[index]))


class Alone(RunFailed):
    """Another process of the run has ended: nothing that takes all of them can be done any more."""


@contextlib.contextmanager
def together():
    """Within it, what JAX raises because another process has ended is Alone."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError, RunFailed) as e:
        cause = e.__cause__ if isinstance(e, RunFailed) else e  # a save can fail of it, too
        of_jax = isinstance(cause, jax.errors.JaxRuntimeError | ValueError) and not isinstance(cause, UsageError)
        if not several() or not of_jax:
            raise
        mine = f"process {jax.process_index()} of {jax.process_count()}"
        raise Alone(f"{mine}: another process has ended ({first_line(cause)}): start all of them again") from e
