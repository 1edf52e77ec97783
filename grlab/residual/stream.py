"""The interface of a residual system: how the stream begins, what each sublayer reads and writes, how it ends.

A system is one file of this package, named after its `residual.kind`: a `Residual`, its `Site`, and its switches. It
is found by being there. The model passes the stream through and never looks inside, so a stream may be any pytree:
[B, T, D], [B, T, N, D], or the sources that a system looks back on.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from grlab import errors
from grlab.ops import streams as ops
from grlab.params import constant

Stream = Any
Gates = Any


@dataclasses.dataclass(frozen=True)
class Frame:
    """What a system is built into."""

    width: int
    sites: int  # two a layer: the token mixer's, then the FFN's
    norm_eps: float
    compute_dtype: jnp.dtype  # of matrix products and of what a read returns
    stream_dtype: jnp.dtype


class Site(nnx.Module):
    """The connection of one sublayer."""

    def read(self, stream: Stream) -> tuple[jax.Array, Gates]:
        """The sublayer's ready input [B, T, D] (the pre-norm is part of the read) and what `write` needs."""
        raise NotImplementedError

    def write(self, stream: Stream, y_BxTxD: jax.Array, gates: Gates) -> Stream:
        """The stream after the sublayer's output y."""
        raise NotImplementedError

    def write_read(self, stream: Stream, y_BxTxD: jax.Array, gates: Gates, next_site: "Site"):
        """This site's write and the next site's read -> (stream, x, gates); a system may fuse the two."""
        stream = self.write(stream, y_BxTxD, gates)
        x_BxTxD, gates = next_site.read(stream)
        return stream, x_BxTxD, gates


class Residual(nnx.Module):
    """A residual system, one a model; `Switches` are the fields of `config.residual` beside `kind`."""

    kinds: typing.ClassVar[dict[str, type["Residual"]]] = {}
    # What the tests over all rows need to know of a system.
    min_streams: typing.ClassVar[int] = 2  # the fewest that make sense, where there is a switch `streams`
    keeps_equal_streams: typing.ClassVar[bool] = True  # equal streams and y = 0 come out as they were, by design
    asleep_at_start: typing.ClassVar[frozenset[str]] = (
        frozenset()
    )  # without a gradient until the first update, by design

    @dataclasses.dataclass(frozen=True)
    class Switches:
        """No switches."""

    def __init_subclass__(cls, *, kind: str, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.kinds[kind] = cls

    def __init__(self, switches, frame: Frame, key: jax.Array):
        raise NotImplementedError

    def site(self, k: jax.Array | int, key: jax.Array) -> Site:
        """The connection of sublayer k (0 .. sites − 1; k may be traced), with parameters drawn from `key`."""
        raise NotImplementedError

    def expand(self, x_BxTxD: jax.Array) -> Stream:
        """The stream that the embedding x starts."""
        raise NotImplementedError

    def collapse(self, stream: Stream) -> jax.Array:
        """The input [B, T, D] of the LM head: it includes the final norm, or replaces it."""
        raise NotImplementedError

    def initial_scale(self, matrix: str) -> float:
        """A factor on the initial values of a sublayer's `matrix`: query, key, value, output, gate, up or down."""
        del matrix
        return 1.0


class FinalNorm(nnx.Module):
    """The sum of n streams, then the model's final RMSNorm: how HC and mHC end (n = 1: the plain final norm)."""

    def __init__(self, frame: Frame, n: int):
        self.gain = constant(jnp.zeros(frame.width), ("embed",))
        # The sum of n equal streams is n times one of them: with eps · n² the norm of the sum is exactly that of one.
        self.eps = frame.norm_eps * n**2
        self.dtype = frame.compute_dtype

    def __call__(self, summed_BxTxD: jax.Array) -> jax.Array:
        return ops.rms_norm(summed_BxTxD, self.gain[...], self.eps).astype(self.dtype)


def home(k: jax.Array | int, n: int, yes: float, no: float) -> jax.Array:
    """[n]: `yes` at the home stream k mod n of sublayer k, `no` at the others: what makes the streams different."""
    return jnp.where(jnp.arange(n) == k % n, yes, no)


def parse_switches(cls: type, fields: Mapping[str, Any], prefix: str = "residual"):
    """The dataclass `cls` from a config's fields; a UsageError names a field or a value that it does not have."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values = {}
    for name, value in fields.items():
        if name not in known:
            raise errors.unknown(prefix, name, known) if known else errors.UsageError(prefix, name, "takes no switches")
        hint = hints[name]
        if typing.get_origin(hint) is typing.Literal:
            errors.one_of(f"{prefix}.{name}", value, typing.get_args(hint))
        elif not isinstance(value, hint) or isinstance(value, bool) != (hint is bool):
            raise errors.UsageError(f"{prefix}.{name}", value, f"must be of type {hint.__name__}")
        values[name] = value
    return cls(**values)
