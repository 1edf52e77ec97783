"""The interface of a residual system: how the stream begins, what each sublayer reads and writes, how it ends.

A system is one file of this package, named after its `residual.kind`: a `Residual`, its `Site`, and its switches. It
is found by being there. The model passes the stream through and never looks inside, so a stream may be any pytree of
arrays whose first axis is the batch: [B, T, D], [B, T, N, D], or the sources that a system looks back on.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from grlab import errors
from grlab.ops import streams as ops
from grlab.params import constant, fold, normal

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
    gated_norm: int = 0  # rank of the gate that every `Norm` carries; 0: plain norms
    float8: bool = False  # streams hold what float8_e4m3fn and a scale can, in arrays of `stream_dtype` = float32


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
    """A residual system, one a model; `Switches` are the fields of `config.residual` of its kind alone."""

    kinds: typing.ClassVar[dict[str, type["Residual"]]] = {}
    # What the tests over all rows need to know of a system.
    min_streams: typing.ClassVar[int] = 2  # the fewest that make sense, where there is a switch `streams`
    keeps_equal_streams: typing.ClassVar[bool] = True  # equal streams and y = 0 come out as they were, by design
    asleep_at_start: typing.ClassVar[frozenset[str]] = frozenset()  # no gradient until the first update, by design
    has_float8: typing.ClassVar[bool] = False  # knows how to store its streams in float8_e4m3fn

    @dataclasses.dataclass(frozen=True)
    class Switches:
        """No switches."""

    def __init_subclass__(cls, *, kind: str | None = None, **kwargs):
        super().__init_subclass__(**kwargs)
        if kind:
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

    # What is written beside the sublayers, such as an n-gram embedding.

    @property
    def n_streams(self) -> int:
        """N of `add`."""
        return 1

    def add(self, stream: Stream, f: Callable[[jax.Array], jax.Array]) -> Stream:
        """The stream with f(its streams) added to its streams, [B, T, N, D] both."""
        return ops.add(stream[..., None, :], f)[..., 0, :]

    def unwritten(self, stream: Stream) -> tuple[jax.Array, Gates] | None:
        """y and gates that change nothing if they are written; None where a write needs more than them of its site.

        A layer's last write is otherwise left to the first read of the next layer: to one `Site.write_read`.
        """
        del stream
        return None

    # What there is of the stream where the backward pass computes each layer again (model.remat=full).

    def pack(self, stream: Stream) -> Any:
        """The stream as it goes from layer to layer."""
        return stream

    def unpack(self, packed: Any) -> Stream:
        """The stream that was packed, exactly."""
        return packed

    def keep(self, packed: Any, k: jax.Array) -> Any:
        """What the backward pass is left of the stream before sublayer k, the first of a layer."""
        del k
        return packed

    def recall(self, kept: Any, after: Any, k: jax.Array) -> Any:
        """The packed stream before sublayer k, from what was kept of it and the packed stream after k's layers.

        They are a period of the layer pattern, in which sublayers alone have written.
        """
        del after, k
        return kept

    def initial_std(self, matrix: str, fan_in: int, fan_out: int, std: float) -> float:
        """The standard deviation that a sublayer's `matrix` starts with, in place of the model's own `std`.

        `matrix` is query, key, value, output, gate, up or down; a projection to heads counts as one matrix.
        """
        del matrix, fan_in, fan_out
        return std


class Norm(nnx.Module):
    """The norm before a sublayer or before the LM head: RMSNorm or LayerNorm with a zero-centred gain.

    With `frame.gated_norm` = r it is GatedNorm (arXiv 2601.22966), u = norm(x) ⊙ σ(W_up SiLU(W_down norm(x))), rank r.
    Its matrices start at N(0, 0.02) (chosen here, as GR's), so that a gate starts near one half.
    """

    def __init__(self, frame: Frame, key: jax.Array, streams: int = 1, layer_norm: bool = False):
        """`streams`: of how many equal streams the input is the sum; the norm of it is exactly that of one of them."""
        d, r = frame.width, frame.gated_norm
        self.eps = frame.norm_eps * streams**2
        self.dtype = frame.compute_dtype
        self.gain = constant(jnp.zeros(d), ("embed",))
        if layer_norm:
            self.bias = constant(jnp.zeros(d), ("embed",))
        if r:
            self.w_down = normal(fold(key, "norm"), "w_down", (d, r), ("embed", "rank"), std=0.02)
            self.w_up = normal(fold(key, "norm"), "w_up", (r, d), ("rank", "embed"), std=0.02)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """The normed x in the compute dtype."""
        return self.exact(x_BxTxD).astype(self.dtype)

    def exact(self, x_BxTxD: jax.Array) -> jax.Array:
        """The same in float32, for a stream that is itself normed."""
        x_BxTxD = x_BxTxD.astype(ops.F32)
        if hasattr(self, "bias"):
            x_BxTxD = x_BxTxD - jnp.mean(x_BxTxD, axis=-1, keepdims=True)
        u_BxTxD = ops.rms_norm(x_BxTxD, self.gain[...], self.eps)
        if hasattr(self, "bias"):
            u_BxTxD = u_BxTxD + self.bias[...]
        return self.gate(u_BxTxD)

    @property
    def gated(self) -> bool:
        return hasattr(self, "w_down")

    def gate(self, u_BxTxD: jax.Array) -> jax.Array:
        """What follows the norm itself: GatedNorm's gate, in float32, or nothing."""
        if not self.gated:
            return u_BxTxD
        z_BxTxR = jax.nn.silu(ops.project(u_BxTxD, self.w_down[...], self.dtype))
        return u_BxTxD * jax.nn.sigmoid(ops.project(z_BxTxR, self.w_up[...], self.dtype))


class SummedStreams(Residual):
    """Streams [B, T, N, D]: n copies of the embedding at the start, their sum and the final norm at the end.

    What HC, mHC and AltUp share; `Switches` has `streams`.
    """

    def __init__(self, switches, frame: Frame, key: jax.Array):
        n = switches.streams
        if n < self.min_streams:
            raise errors.UsageError("residual.streams", n, f"must be at least {self.min_streams}")
        self.switches = switches
        self.frame = frame
        self.final_norm = Norm(frame, fold(key, "final_norm"), streams=n)

    def expand(self, x_BxTxD):
        return ops.repeat(x_BxTxD.astype(self.frame.stream_dtype), self.switches.streams)

    @property
    def n_streams(self):
        return self.switches.streams

    def add(self, stream_BxTxNxD, f):
        return ops.add(stream_BxTxNxD, f)

    def collapse(self, stream_BxTxNxD):
        return self.final_norm(jnp.sum(stream_BxTxNxD.astype(ops.F32), axis=-2))


def home(k: jax.Array | int, n: int, yes: float, no: float) -> jax.Array:
    """[n]: `yes` at the home stream k mod n of sublayer k, `no` at the others: what makes the streams different."""
    return jnp.where(jnp.arange(n) == k % n, yes, no)


def check_permutations(n: int) -> None:
    """Raises where n streams have too many permutations to weigh."""
    if n > 6:
        raise errors.UsageError("residual.streams", n, f"a mixture of all {math.factorial(n)} permutations: at most 6")


def near_identity(n: int) -> jax.Array:
    """Logits [n!] of `ops.permutation_mixture` that give the identity a weight of 0.992, as 6 I − 3 does at n = 4.

    They are 0 for the identity and, at n = 4, −8 for every other permutation.
    """
    others = math.factorial(n) - 1
    return -(8.0 + math.log(others / 23)) * (jnp.arange(1 + others) > 0)


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
