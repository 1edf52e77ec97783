"""The TPU kernels of the write of wide streams, interpreted, against the plain path: values and gradients.

Seen to fail: H in place of Hᵀ in the gradient of the streams; the gates of a block's first rows taken for all.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grlab.ops import streams, write_tpu

SHAPES = [(600, 4, 128), (1, 2, 40), (70, 3, 136), (192, 8, 24), (513, 1, 640)]  # T, N, D


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_are_the_plain_path(shape, mixes, dtype, tolerance):
    t, n, d = shape

    def normal(seed, *sizes):
        return jax.random.normal(jax.random.key(seed), sizes)

    stream_TxNxD, y_TxD, dnew_TxNxD = (normal(i, t, *s).astype(dtype) for i, s in enumerate([(n, d), (d,), (n, d)]))
    gates = normal(3, t, n, 1), normal(4, t, n, n) if mixes else None
    args = streams._tokens(stream_TxNxD, gates[0], y_TxD, gates[1])
    found = write_tpu.forward(*args, interpret=True), *write_tpu.backward(*args, dnew_TxNxD, interpret=True)
    plain = stream_TxNxD, gates[0], y_TxD, gates[1]
    dstream_TxNxD, ds, dy_TxD, dh = streams._plain_write_backward(*plain, dnew_TxNxD)
    dgates_TxG = jnp.concatenate([*([dh.reshape(t, n * n)] if mixes else []), ds[..., 0]], axis=1)
    wanted = streams.plain_write(*plain), dstream_TxNxD, dgates_TxG, dy_TxD
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()
