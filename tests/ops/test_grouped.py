"""The products of groups of rows against a loop over the groups in float64: both ways of computing them, and which
device has which.

Seen to fail: the rows of the next group in a block; too few blocks; the last block of a group alone, or sums over
blocks in bfloat16, in the gradient of w; each `side` of the searches; places not counted from the group's start; what
is out of range clipped and not zero; the gradient of w in float32 for a w in bfloat16; a ragged sum in bfloat16; blocks
on other devices, or ragged products on a CPU, for the product and for the gradient of w.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grlab.ops import grouped
from grlab.ops.grouped import BLOCK, grouped_matmul

I, O = 5, 7
SIZES = {
    "no multiples of a block": [10, BLOCK + 1, 3, 2 * BLOCK - 1],
    "multiples of a block": [BLOCK, 2 * BLOCK, BLOCK],
    "empty groups": [0, 3, 0, 0, BLOCK, 0],
    "all rows in one group": [0, 0, 2 * BLOCK + 6, 0],
    "one group": [BLOCK + 4],
    "one row": [0, 1, 0],
    "more groups than rows": [1, 0, 0, 1, 0, 2, 0, 0],
}


def draw(sizes, dtype):
    """x, w, the cotangent of the product."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((sum(sizes), I), (len(sizes), I, O), (sum(sizes), O))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def stated(x_RxI, w_ExIxO, dout_RxO, sizes):
    """(out, dx, dw): a loop over the groups."""
    x, w, dout = (np.asarray(a, np.float64) for a in (x_RxI, w_ExIxO, dout_RxO))
    ends = np.cumsum(sizes)
    rows = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    out = np.concatenate([x[r] @ w_ for r, w_ in zip(rows, w, strict=True)])
    dx = np.concatenate([dout[r] @ w_.T for r, w_ in zip(rows, w, strict=True)])
    return out, dx, np.stack([x[r].T @ dout[r] for r in rows])


def as_on_a_cpu(x_RxI, w_ExIxO, dout_RxO, sizes_E):
    out, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes_E), x_RxI, w_ExIxO)
    return out, *vjp(dout_RxO)


def as_elsewhere(x_RxI, w_ExIxO, dout_RxO, sizes_E):
    """What `grouped_matmul` and its gradient are made of on other devices."""
    out = grouped._ragged(x_RxI, w_ExIxO, sizes_E)
    dx = grouped._ragged(dout_RxO, jnp.swapaxes(w_ExIxO, 1, 2), sizes_E)
    return out, dx, grouped._weights_ragged(x_RxI, dout_RxO, sizes_E).astype(w_ExIxO.dtype)


@pytest.mark.parametrize("way", [as_on_a_cpu, as_elsewhere])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients(sizes, dtype, way):
    """In bfloat16 what is accumulated in float32 is rounded once: by at most one part in 2⁸."""
    x, w, dout = draw(sizes, dtype)
    ours = jax.jit(way)(x, w, dout, jnp.array(sizes, jnp.int32))
    for a, b in zip(ours, stated(x, w, dout, sizes), strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        rtol = 1e-6 if dtype == "float32" else 2**-8
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=rtol, atol=1e-6 * np.abs(b).max())


def test_without_jit():
    sizes = SIZES["empty groups"]
    x, w, dout = draw(sizes, "float32")
    for a, b in zip(as_on_a_cpu(x, w, dout, jnp.array(sizes)), stated(x, w, dout, sizes), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max())


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_each_device_has_its_way(platform):
    """Three products, forward and for the two gradients: of blocks on a CPU, ragged ones elsewhere."""
    sizes = SIZES["no multiples of a block"]
    arguments = (*draw(sizes, "float32"), jnp.array(sizes))
    text = jax.jit(as_on_a_cpu).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    of_blocks = [f"tensor<{BLOCK}x" in line for line in text.splitlines() if "stablehlo.dot_general" in line]
    ragged = text.count('"chlo.ragged_dot"(')
    assert (of_blocks, ragged) == (([True] * 3, 0) if platform == "cpu" else ([], 3))
