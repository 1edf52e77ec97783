"""What the kernels for TPUs (Pallas, Mosaic) share. Dimensions: T all tokens, N streams, D width."""

import contextlib
import contextvars

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from grlab.ops.mesh import device_kind

F32 = jnp.float32
LANES = 128  # of a vector: widths and blocks of tokens are multiples of it
VMEM = 60 * 2**20  # of a chip's memory, what a kernel may use on v5e and what came after it


def vmem() -> int:
    """VMEM of the chip that layers are traced for: a v4 has 16 MiB in all."""
    return 15 * 2**20 if device_kind() in ("TPU v2", "TPU v3", "TPU v4") else VMEM


_KERNELS: contextvars.ContextVar[bool] = contextvars.ContextVar("kernels", default=True)


@contextlib.contextmanager
def without_kernels():
    """Within it, what is traced is plain JAX wherever it will run: what kernels are measured against."""
    token = _KERNELS.set(False)
    try:
        yield
    finally:
        _KERNELS.reset(token)


def where_it_fits(fits: bool, fused, plain, *args):
    """fused(*args) where the kernels fit and the program is for a TPU, plain(*args) elsewhere."""
    if not fits or not _KERNELS.get():
        return plain(*args)
    return jax.lax.platform_dependent(*args, tpu=fused, default=plain)


def by_tokens(block: int, step=lambda k: k):
    """Block k of an array [T, size], or [n, T, size], is its k-th `block` tokens; k is `step` of the grid's indices."""

    def spec(n, size):
        if n is None:
            return pl.BlockSpec((block, size), lambda *at: (step(*at), 0))
        return pl.BlockSpec((n, block, size), lambda *at: (0, step(*at), 0))

    return spec


def by_lanes(block: int, step=lambda k: k):
    """The same of an array [rows, T], the tokens along the lanes."""
    return lambda rows: pl.BlockSpec((rows, block), lambda *at: (0, step(*at)))


def whole(shape: tuple[int, ...]) -> pl.BlockSpec:
    """The whole array, brought to the chip once."""
    return pl.BlockSpec(shape, lambda *at: (0,) * len(shape), pipeline_mode=pl.Buffered(1))


def block_of(tokens: int, most: int, bytes_a_token: int, room: int) -> int:
    """How many tokens a block has: at most `most` and no more than there are, and LANES if no more fit in `room`."""
    block = most
    while block > LANES and (block > tokens or block * bytes_a_token > room):
        block //= 2
    return min(block, tokens)


def dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int, dtype) -> jax.Array:
    """The product of two matrices in `dtype`, over these axes, accumulated in float32."""
    precision = jax.lax.Precision.HIGHEST if dtype == F32 else None
    return jax.lax.dot_general(
        a.astype(dtype), b.astype(dtype), (((a_axis,), (b_axis,)), ((), ())), precision, preferred_element_type=F32
    )


def for_rows(block: int, body) -> None:
    """body(rows) for the rows of a block, a few at a time: what they are computed into then stays in registers."""
    size = 16 if block % 16 == 0 else block  # 16 rows of bfloat16 are a vector's

    @pl.loop(0, block // size)
    def _(k):
        body(pl.ds(pl.multiple_of(k * size, size), size))


def columns(d: int, size: int = 4 * LANES) -> list[slice]:
    """The columns of a width, so many at a time."""
    return [slice(k, min(k + size, d)) for k in range(0, d, size)]


def put_column(x_TxL: jax.Array, k: int, column_Tx1: jax.Array) -> jax.Array:
    """x with its k-th column replaced."""
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x_TxL.shape, 1) == k, column_Tx1, x_TxL)
