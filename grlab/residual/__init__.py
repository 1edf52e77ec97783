"""Residual systems behind one interface (`grlab.residual.stream`), each a module named after its `residual.kind`."""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from grlab import errors
from grlab.residual.stream import Frame, Gates, Residual, Site, Stream, parse_switches

__all__ = ["Gates", "Residual", "Site", "Stream", "build", "kinds"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def kinds() -> list[str]:
    """The names that `residual.kind` can have."""
    return sorted(Residual.kinds)


def build(
    fields: Mapping[str, Any],
    *,
    width: int,
    layers: int,
    key: jax.Array,
    norm_eps: float = 1e-6,
    compute_dtype: str = "float32",
) -> Residual:
    """The residual system that `config.residual` describes.

    Args:
      fields: `kind`, `stream_dtype`, `gated_norm` (the rank of a gate on every `Norm`; 0: none), and the switches of
        that kind.
      width: D, channels of the model.
      layers: the model's layers; a layer has two sites.
      key: of the system's own parameters (those of the sites are drawn from the key given to `site`).
      norm_eps: of every RMS normalisation.
      compute_dtype: of matrix products and of what a read returns.

    Raises:
      UsageError: an unknown kind, switch or value, or a combination that the system does not have.
    """
    fields = dict(fields)
    kind = fields.pop("kind", None)
    errors.one_of("residual.kind", kind, kinds())
    stream_dtype = fields.pop("stream_dtype", "float32")
    gated_norm = fields.pop("gated_norm", 0)
    if gated_norm:
        errors.positive("residual.gated_norm", gated_norm)
    cls = Residual.kinds[kind]
    float8 = ["float8_e4m3fn"] if cls.has_float8 else []
    errors.one_of("residual.stream_dtype", stream_dtype, ["float32", "bfloat16", *float8])
    switches = parse_switches(cls.Switches, fields)
    dtype = jnp.dtype("float32" if stream_dtype in float8 else stream_dtype)
    frame = Frame(
        width, 2 * layers, norm_eps, jnp.dtype(compute_dtype), dtype, gated_norm, float8=stream_dtype in float8
    )
    return cls(switches, frame, key)
