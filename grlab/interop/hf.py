"""Hugging Face checkpoints: `qwen4_exp` (Qwen3.8-Flash-Next), whole or its residual part, and `deepseek_v4`'s alone."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from grlab import config as configs
from grlab import parallel, residual
from grlab.config import differences
from grlab.errors import UsageError
from grlab.interop import deepseek_v4, qwen4_config, qwen4_exp
from grlab.interop.public_config import PublicConfig
from grlab.interop.tensors import Parameters, TensorFolder, Where, check, write
from grlab.model import Decoder
from grlab.residual.stream import Site


def import_model(
    path: str | Path, mesh: Mesh | None = None, overrides: Sequence[str] = ()
) -> tuple[ConfigDict, Decoder]:
    """(the config, the model) of a `qwen4_exp` checkpoint, float32, on `mesh` by the config's rules if one is given.

    `overrides` are of what its config.json does not say, such as "model.compute_dtype=float32". A parameter, or each
    part of one that is split over devices, is read when its turn comes. Raises one UsageError that lists the tensors
    that are unknown, missing or mis-shaped.
    """
    folder = TensorFolder(path)
    config, vocab, separator = qwen4_config.read_config(folder, overrides)
    model = nnx.eval_shape(lambda: Decoder(config.model, config.residual, vocab, jax.random.key(0), separator))
    layout = qwen4_exp.layout(folder, config, vocab)
    tensors = list(layout.tensors(model))
    buffers = layout.buffers()
    check(folder, {t.name: t.shape for t in tensors}, (*qwen4_exp.IGNORED, *buffers))
    for name, value in buffers.items():
        if name in folder.shapes and not np.array_equal(folder.read(name), value):
            raise UsageError("--hf", str(path), f"{name} is not what its config.json gives: other hashes")

    parameters = Parameters(folder, tensors)
    graphdef, state = nnx.split(model)
    shardings = parallel.shardings(state, mesh, config.rules) if mesh else None
    flat = nnx.to_flat_state(state)
    placed = nnx.to_flat_state(shardings) if mesh else [(where, None) for where, _ in flat]
    filled = []
    for (where, variable), (_, sharding) in zip(flat, placed, strict=True):
        shape = variable.shape
        if mesh:
            value = jax.make_array_from_callback(
                shape,
                sharding.get_value(),
                lambda index, where=where, shape=shape: parameters.part(where, shape, index),
            )
        else:
            value = jnp.asarray(parameters.whole(where, shape))
        filled.append((where, variable.replace(value)))
    return config, nnx.merge(graphdef, nnx.from_flat_state(filled))


def export_model(
    config: ConfigDict, model: Decoder, path: str | Path, separator: int = 0, file_bytes: int = 5_000_000_000
) -> None:
    """Writes our model as a `qwen4_exp` checkpoint of float32, which transformers and `import_model` read.

    That documents are kept apart (model.separate_documents) no tensor tells: transformers reads a text as one. Raises
    UsageError for a model that is none: another residual than GR as published, or other sublayers.
    """
    published = configs.load("configs/gr.py:flash_next")
    free = ("streams", "rank", "init_std", "rounding", "stream_dtype")  # sizes, and what no tensor tells
    for name, (ours, theirs) in differences(config.residual.to_dict(), published.residual.to_dict(), free).items():
        raise UsageError(f"residual.{name}", ours, f"a qwen4_exp has GR as published: {theirs!r}")
    m = config.model
    for name, value, fits in (
        ("pattern", m.pattern, {*model.pattern} <= {"gdn", "qsa"}),
        ("output_gate", m.output_gate, m.output_gate),
        ("moe.experts", m.moe.experts, m.moe.experts > 0),
        ("moe.shared", m.moe.shared, m.moe.shared > 0),
    ):
        if not fits:
            remedy = "a qwen4_exp has layers of gdn and qsa, with output_gate, experts and a shared one"
            raise UsageError(f"model.{name}", value, remedy)
    vocab = model.embedding.shape[0]
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    layout = qwen4_exp.Qwen4Exp(config, vocab)

    def tensors():
        for tensor in layout.tensors(model):
            out = np.empty(tensor.shape, np.float32)
            for (where, index), view in zip(tensor.parts, tensor.views(out), strict=True):
                view[...] = np.asarray(flat[where].get_value()[index])
            yield tensor.name, out
        yield from layout.buffers().items()

    write(path, qwen4_config.public_config(config, vocab, separator), tensors(), file_bytes)


@dataclasses.dataclass(frozen=True)
class ResidualPart:
    """The residual system of a checkpoint: the system itself, with its end, and the site of each sublayer in order."""

    system: residual.Residual
    sites: list[Site]


def import_residual(path: str | Path) -> ResidualPart:
    """The residual part of a `qwen4_exp` or `deepseek_v4` checkpoint; no other tensor is read.

    Raises UsageError for other models, and one that lists the tensors that are missing or mis-shaped.
    """
    folder = TensorFolder(path)
    theirs = PublicConfig(folder, (*qwen4_config.MODEL_TYPES, *deepseek_v4.MODEL_TYPES))
    if theirs.fields["model_type"] in deepseek_v4.MODEL_TYPES:
        fields, layers, width, eps = deepseek_v4.read_config(theirs)
        tensors = list(deepseek_v4.residual(folder, layers, width, fields["streams"]))
    else:
        config, vocab, _ = qwen4_config.read_config(folder)
        fields, layers = config.residual.to_dict(), config.model.layers
        width, eps = config.model.width, config.model.norm_eps
        tensors = list(qwen4_exp.layout(folder, config, vocab).residual())
    check(folder, {t.name: t.shape for t in tensors}, ignored=("",))  # whatever else there is

    def build():
        key = jax.random.key(0)
        system = residual.build(fields, width=width, layers=layers, key=key, norm_eps=eps)
        return system, [system.site(k, key) for k in range(2 * layers)]

    system, sites = nnx.eval_shape(build)
    parameters = Parameters(folder, tensors)

    def fill(module, prefix: Where):
        graphdef, state = nnx.split(module)
        filled = []
        for where, variable in nnx.to_flat_state(state):
            value = parameters.whole((*prefix, *where), variable.shape)
            if where[-2:] in (("norm", "gain"), ("final_norm", "gain")):  # DeepSeek's norms hold the scale itself
                value = value - 1
            filled.append((where, variable.replace(jnp.asarray(value))))
        return nnx.merge(graphdef, nnx.from_flat_state(filled))

    return ResidualPart(fill(system, ("residual",)), [fill(site, ("site", k)) for k, site in enumerate(sites)])
