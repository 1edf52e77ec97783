"""The TPU kernels of GR's read and of its write and read, interpreted, against the plain path: values and gradients.

Seen to fail: the mask of the tokens beyond the last left out, and the cotangent of R' out of that of y.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grlab.ops import gated, gated_tpu

SHAPES = [(200, 4, 128, 16, 4), (1, 2, 40, 3, 2), (64, 8, 24, 5, 8), (70, 3, 136, 8, 0)]  # T, N, D, R, M


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_are_the_plain_path(shape, dtype, tolerance, writes):
    t, n, d, r, m = shape
    dtype = jnp.dtype(dtype)

    def normal(seed, *sizes, std=1.0):
        return std * jax.random.normal(jax.random.key(seed), sizes)

    stream_TxNxD, gain_NxD = normal(0, t, n, d).astype(dtype), normal(1, n, d, std=0.5)
    w_in_NxDxI = normal(2, n, d, r + m, std=d**-0.5).astype(dtype)
    w_up_NxRxD = normal(3, n, r, d, std=r**-0.5).astype(dtype)
    weights, settings = (gain_NxD, w_in_NxDxI, w_up_NxRxD), {"eps": 1e-6, "reach": 2.0, "dtype": dtype}
    written = (normal(6, t, n), normal(7, t, d).astype(dtype)) if writes else ()
    forward, backward = (
        [f, lambda *args, fused=fused, **settings: fused(*args, **settings, interpret=True)]
        for f, fused in ((gated._plain_forward, gated_tpu.forward), (gated._plain_backward, gated_tpu.backward))
    )
    wanted, found = (f(stream_TxNxD, *weights, *written, **settings) for f in forward)
    *new, _, a_TxR, _ = wanted
    cotangents = [normal(4, t, d).astype(dtype), normal(5, t, m)]
    if writes:
        cotangents += [normal(8, t, n, d).astype(dtype), *written]
    args = (*new, stream_TxNxD)[:1] + (*weights, a_TxR, *cotangents)
    more_wanted, more_found = (f(*args, **settings) for f in backward)
    for a, b in zip((*found, *more_found), (*wanted, *more_wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape and np.abs(a - b).max(initial=0) <= tolerance * np.abs(b).max(initial=0)
