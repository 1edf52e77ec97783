"""The product with its own derivative is jnp.matmul with JAX's.

Seen to fail: the gradient of w not transposed back where I ≥ O; its operands exchanged where I < O.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grlab.ops.matmul import matmul


@pytest.mark.parametrize("fan_in, fan_out", [(7, 3), (3, 7), (5, 5)])
@pytest.mark.parametrize("x_dtype, dtype", [("float32", None), ("bfloat16", None), ("bfloat16", "float32")])
def test_values_and_gradients(fan_in, fan_out, x_dtype, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x_BxTxI = jax.random.normal(keys[0], (2, 6, fan_in), x_dtype)
    w_IxO = jax.random.normal(keys[1], (fan_in, fan_out), x_dtype)
    cotangent = jax.random.normal(keys[2], (2, 6, fan_out), dtype or x_dtype)
    ours, vjp = jax.vjp(lambda x, w: matmul(x, w, dtype=dtype), x_BxTxI, w_IxO)
    theirs, their_vjp = jax.vjp(lambda x, w: jnp.matmul(x, w, preferred_element_type=dtype), x_BxTxI, w_IxO)
    rtol = 1e-6 if x_dtype == "float32" else 1e-2
    for a, b in zip((ours, *vjp(cotangent)), (theirs, *their_vjp(cotangent)), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=rtol, atol=rtol * np.abs(b).max()
        )
