"""GR's read as one operation against the read that is composed of its parts: values and gradients.

Seen to fail: the gain left out of the gradient of the streams, and W_more's out of that of R̂.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from grlab import residual
from grlab.residual.stream import Site

SHAPES = [(2, 3, 4, 16), (1, 1, 2, 24), (1, 5, 8, 8), (3, 2, 3, 10)]  # B, T, N, D
SWITCHES = [{}, {"mix": "free"}, {"norm": "shared_gain"}, {"gate_range": 2}]


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_it_is_the_read_of_its_parts(shape, switches, dtype, tolerance):
    n, d = shape[2:]
    fields = {"kind": "gr", "streams": n, "rank": 3, "init_std": 0.5, "stream_dtype": dtype, **switches}
    system = residual.build(fields, width=d, layers=1, key=jax.random.key(0), compute_dtype=dtype)
    site = system.site(1, jax.random.key(1))
    site.gain[...] = 0.5 * jax.random.normal(jax.random.key(2), site.gain.shape)
    stream_BxTxNxD = jax.random.normal(jax.random.key(3), shape, jnp.dtype(dtype))
    graphdef, params = nnx.split(site)

    def loss(params, stream_BxTxNxD, read):
        x_BxTxD, gates = getattr(nnx.merge(graphdef, params), read)(stream_BxTxNxD)
        out = [x_BxTxD, *(gate for gate in gates if gate is not None)]
        weights = [jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(out)]
        return sum(jnp.sum(w * x) for w, x in zip(weights, out, strict=True)), out

    found, wanted = (
        jax.value_and_grad(loss, (0, 1), has_aux=True)(params, stream_BxTxNxD, read) for read in ("read", "_any_read")
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        # Of one token a gradient may be a sum that cancels, of terms that bfloat16 has rounded.
        size = np.abs(b).max() if dtype == "float32" else max(1, np.abs(b).max())
        assert np.abs(a - b).max() <= tolerance * size


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_write_and_read_is_the_two_in_turn(shape, dtype, tolerance):
    n, d = shape[2:]
    fields = {"kind": "gr", "streams": n, "rank": 3, "init_std": 0.5, "stream_dtype": dtype}
    system = residual.build(fields, width=d, layers=1, key=jax.random.key(0), compute_dtype=dtype)
    site, next_site = (system.site(k, jax.random.key(1 + k)) for k in range(2))
    graphdef, params = nnx.split(next_site)
    stream_BxTxNxD = jax.random.normal(jax.random.key(3), shape, jnp.dtype(dtype))
    y_BxTxD = jax.random.normal(jax.random.key(4), (*shape[:2], d), jnp.dtype(dtype))
    s_BxTxNx1 = jax.random.normal(jax.random.key(5), (*shape[:3], 1))

    def loss(params, stream_BxTxNxD, y_BxTxD, s_BxTxNx1, write_read):
        next_site, gates = nnx.merge(graphdef, params), (s_BxTxNx1, None)
        out = jax.tree.leaves(write_read(site, stream_BxTxNxD, y_BxTxD, gates, next_site))
        weights = [jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(out)]
        return sum(jnp.sum(w * x) for w, x in zip(weights, out, strict=True)), out

    found, wanted = (
        jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(params, stream_BxTxNxD, y_BxTxD, s_BxTxNx1, write_read)
        for write_read in (type(site).write_read, Site.write_read)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * max(1, np.abs(b).max())
