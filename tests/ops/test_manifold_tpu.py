"""The TPU kernels of mHC's read, interpreted, against the plain path: values and gradients.

Seen to fail: the mask of the tokens beyond the last left out.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grlab.ops import manifold, manifold_tpu

SHAPES = [(600, 4, 128), (1, 2, 40), (70, 3, 136), (130, 8, 24)]  # T, N, D


@pytest.mark.parametrize("v4_eps", [None, 1e-2], ids=["paper", "deepseek_v4"])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_are_the_plain_path(shape, dtype, tolerance, v4_eps):
    t, n, d = shape
    o = n * (n + 2)

    def normal(seed, *sizes, std=1.0):
        return std * jax.random.normal(jax.random.key(seed), sizes)

    settings = manifold_tpu.Settings(1e-6, 1e-5, 5, v4_eps, jnp.dtype(dtype))
    stream_TxNxD = normal(0, t, n, d).astype(dtype)
    weights = normal(1, n * d, o, std=(n * d) ** -0.5), normal(2, o), normal(3, o), normal(4, d, std=0.5)
    cotangents = normal(5, t, d).astype(dtype), normal(6, t, n), normal(7, t, n, n)

    @jax.jit
    def plain(*args):
        out, vjp = jax.vjp(functools.partial(manifold._plain, settings=settings), *args)
        return *out, *vjp(cotangents)

    @jax.jit
    def fused(*args):
        x_TxD, post_NxT, res_PxT, *kept = manifold_tpu.forward(*args, settings, interpret=True)
        dx_TxD, dpost_TxN, dres_TxNxN = cotangents
        of_maps = dpost_TxN.T, dres_TxNxN.reshape(t, -1).T
        grads = manifold_tpu.backward(*args, *kept, dx_TxD, *of_maps, settings, interpret=True)
        return x_TxD, post_NxT.T, res_PxT.T.reshape(t, n, n), *grads

    args = stream_TxNxD, *weights
    for a, b in zip(fused(*args), plain(*args), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        wide = a.dtype == jnp.bfloat16  # all else is of float32 whatever the streams are of
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= (tolerance if wide else 2e-6) * np.abs(b).max()
