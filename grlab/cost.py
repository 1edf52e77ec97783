"""What a config costs on a TPU topology: its training step, compiled for it ahead of time and without the hardware."""

import dataclasses
import importlib.util
import math
import re

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from grlab import errors, hlo, parallel, traffic
from grlab.chips import CHIPS, Chip
from grlab.data.tokenizer import Bytes
from grlab.model import Decoder
from grlab.ops.mesh import BY_BATCH
from grlab.params import count, count_active
from grlab.train import flops
from grlab.train.step import make_trainer


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips that are wired together, such as "v5e:4x4"."""

    name: str
    chip: Chip
    devices: tuple  # that a program can be compiled for, one a chip


@dataclasses.dataclass(frozen=True)
class Cost:
    """A training step of one config on one topology. Bytes, counts and seconds are of one chip and one step."""

    params: int
    active_params: int  # that a token makes use of
    connection_params: int  # more than with the pre-norm residual
    flops_per_token: float  # of training, recomputation left out (grlab/train/flops.py)
    connection_flops_per_token: float  # more than with the pre-norm residual
    hbm_bytes: float  # that a chip has to hold at once; where that does not fit, perhaps the temporaries alone
    memory: dict[str, int] | None  # what it is the sum of; None where the compiler refused the step
    fits: bool
    mesh: dict[str, int]
    tokens_per_step: int
    tokens: int  # of the whole run
    moved: traffic.Moved | None = None  # this and what follows: None where the step does not fit
    compute_s: float | None = None
    hbm_s: float | None = None
    ici_s: float | None = None
    tokens_per_s: float | None = None  # of all chips, at most
    chip_hours: float | None = None  # of the whole run, at least

    @property
    def step_s(self) -> float | None:
        """The longest of the three: a step takes at least that."""
        return max(self.compute_s, self.hbm_s, self.ici_s) if self.fits else None

    @property
    def bound(self) -> str | None:
        """What takes longest."""
        times = {"compute": self.compute_s, "HBM": self.hbm_s, "interconnect": self.ici_s}
        return max(times, key=times.get) if self.fits else None


def topology(name: str) -> Topology:
    """The topology of that name: a chip and how many of them there are in each direction.

    Raises:
      UsageError: no such chip, a shape that the chip's hosts do not make, or no TPU compiler.
    """
    kind, _, shape = name.partition(":")
    if kind not in CHIPS:
        raise errors.UsageError("topology", name, f"{errors.nearest(kind, CHIPS)}known chips: {', '.join(CHIPS)}")
    chip, directions = CHIPS[kind], len(CHIPS[kind].largest)
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)" + f"{{{directions - 1}}}", shape):
        example = f"{kind}:{'x'.join(['4'] * directions)}"
        raise errors.UsageError("topology", name, f"give the chips in each of its {directions} directions: {example}")
    sizes = tuple(map(int, shape.split("x")))
    if any(n > most for n, most in zip(sorted(sizes), sorted(chip.largest), strict=True)):  # it would end the process
        largest = "x".join(map(str, chip.largest))
        raise errors.UsageError("topology", name, f"must be no larger than the largest slice of {kind}, {largest}")
    if importlib.util.find_spec("libtpu") is None:
        remedy = f"needs the TPU compiler, and no TPU: pip install 'jax[tpu]=={jax.__version__}'"
        raise errors.UsageError("topology", name, remedy)
    try:
        devices = topologies.get_topology_desc(name, platform="tpu", wrap=chip.wraps(sizes), **chip.options).devices
    except jax.errors.JaxRuntimeError as e:
        raise errors.UsageError("topology", name, f"the TPU compiler has no such shape: {errors.first_line(e)}") from e
    if len(devices) != math.prod(sizes):
        raise AssertionError(f"{name} has {len(devices)} devices: not one a chip")
    return Topology(name, chip, tuple(devices))


def cost(config: ConfigDict, on: Topology) -> Cost:
    """Compiles the training step of the resolved config and reads what it came to; minutes for a large model.

    A step that the compiler refuses for want of memory is one that does not fit.

    Raises:
      UsageError: a mesh or a batch that the chips do not divide into, or a config that cannot be.
    """
    mesh = parallel.make_mesh(config.mesh, on.devices)
    parallel.check_batch(config.batch_size, config.optim.accumulate, mesh)
    vocab = vocabulary(config)
    trainer = make_trainer(config, vocab, mesh)
    plain = config.copy_and_resolve_references()
    plain.unlock()
    plain.residual = {"kind": "prenorm"}
    plain_params = nnx.state(nnx.eval_shape(lambda: Decoder(plain.model, plain.residual, vocab, jax.random.key(0))))
    params, tokens = count(trainer.abstract.params), config.batch_size * config.seq_len
    per_token = flops.per_token(config, vocab)
    compiled = compile_step(config, trainer, mesh)
    memory = None if isinstance(compiled, float) else _memory(compiled)
    needs = compiled if memory is None else float(sum(memory.values()))
    found = Cost(
        params=params,
        active_params=count_active(trainer.abstract.params),
        connection_params=params - count(plain_params),
        flops_per_token=per_token,
        connection_flops_per_token=per_token - flops.per_token(plain, vocab),
        hbm_bytes=needs,
        memory=memory,
        fits=memory is not None and needs <= on.chip.hbm_bytes,
        mesh=dict(mesh.shape),
        tokens_per_step=tokens,
        tokens=tokens * config.steps,
    )
    return _timed(found, traffic.moved(hlo.Program(compiled.as_text())), on) if found.fits else found


def _timed(found: Cost, moved: traffic.Moved, on: Topology) -> Cost:
    """`found` with its times, those of a roofline: each of the three at its peak and the others hidden behind it."""
    chips = len(on.devices)
    found = dataclasses.replace(
        found,
        moved=moved,
        compute_s=found.flops_per_token * found.tokens_per_step / chips / on.chip.peak_flops,
        hbm_s=moved.hbm_bytes / on.chip.hbm_bandwidth,
        ici_s=sum(moved.sent_bytes.values()) / on.chip.ici_bandwidth,
    )
    tokens_per_s = found.tokens_per_step / found.step_s
    return dataclasses.replace(found, tokens_per_s=tokens_per_s, chip_hours=chips * found.tokens / tokens_per_s / 3600)


def _memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """The bytes of HBM that a chip holds while the program runs, by what they are for."""
    m = compiled.memory_analysis()
    return {
        "arguments": m.argument_size_in_bytes,
        "outputs": m.output_size_in_bytes - m.alias_size_in_bytes,  # those that do not take an argument's place
        "temporaries": m.temp_size_in_bytes,
        "program": m.generated_code_size_in_bytes,
    }


def compile_step(config: ConfigDict, trainer, mesh) -> jax.stages.Compiled | float:
    """The compiled training step, or the bytes of HBM that it would need where that is more than there are."""
    by_batch = NamedSharding(mesh, BY_BATCH)
    tokens_BxT = jax.ShapeDtypeStruct((config.batch_size, config.seq_len), jnp.int32, sharding=by_batch)
    lowered = trainer.step.lower(trainer.abstract, {"tokens_BxT": tokens_BxT, "targets_BxT": tokens_BxT})
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        needs = re.search(r"([\d.]+)([KMGT])", str(e).partition("RESOURCE_EXHAUSTED")[2])
        if needs is None:
            raise
        return float(needs[1]) * 1024 ** " KMGT".index(needs[2])


def vocabulary(config: ConfigDict) -> int:
    """How many tokens the model is of, without reading the corpus."""
    if config.model.vocab:
        return config.model.vocab
    if config.data.tokenizer is not None:
        raise errors.UsageError("config.model.vocab", 0, "give how many ids the tokenizer has: --config.model.vocab=N")
    return Bytes.vocab_size
