"""What the TPU kernels of wide streams come to on a chip of v5p, as JSON; in a process of its own, as tests/aot.py is.

    python -m tests.ops.kernels

At a width of 2560, four streams and 16,384 tokens in bfloat16. Of each operation, alone and with its derivative: how
many kernels it is, the bytes of HBM that it moves, the fewest that it could, every argument and result once in each
direction, and the bytes of its temporaries. The compiler chooses how arguments lie in memory, as it does inside a
larger program.
"""

import json

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from grlab import cost, hlo, traffic
from grlab.ops import manifold, streams

B, T, N, D = 4, 4096, 4, 2560
O = N * (N + 2)


def kernels() -> dict:
    """name -> (the operation, its arguments)."""

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def write(stream_BxTxNxD, s_BxTxN, y_BxTxD, h_BxTxNxN):
        return streams.write(stream_BxTxNxD, s_BxTxN[..., None], y_BxTxD, h_BxTxNxN)

    stream, y = array(B, T, N, D, dtype=jnp.bfloat16), array(B, T, D, dtype=jnp.bfloat16)
    post, res = array(B, T, N), array(B, T, N, N)
    weights = array(N * D, O), array(O), array(O), array(D)
    found = {"write": (write, (stream, post, y, res))}
    for form, v4_eps in (("paper", None), ("deepseek_v4", 1e-6)):
        settings = manifold.Settings(1e-6, 1e-6, 20, v4_eps, jnp.dtype(jnp.bfloat16))
        found[f"read_{form}"] = (lambda *args: manifold.read(*args, settings)), (stream, *weights)
    return found


def facts(f, args, floor: int) -> dict:
    auto = Format(Layout.AUTO, SingleDeviceSharding(cost.topology("v5p:2x2x1").devices[0]))
    compiled = jax.jit(f, in_shardings=auto, out_shardings=auto).lower(*args).compile()
    text = compiled.as_text()
    return {
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "moved": traffic.moved(hlo.Program(text)).hbm_bytes,
        "floor": floor,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    }


def bytes_of(*arrays) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


if __name__ == "__main__":
    found = {}
    for name, (f, args) in kernels().items():

        def both(args, cotangents):
            out, vjp = jax.vjp(f, *args)
            return out, vjp(cotangents)

        out = jax.eval_shape(f, *args)
        once = bytes_of(args, out)
        found[name] = facts(f, args, once)
        found[f"{name} and its derivative"] = facts(both, (args, out), once + bytes_of(args, out, args))
    print(json.dumps(found))
