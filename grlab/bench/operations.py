"""Each operation of wide streams, compiled for a TPU chip: what it moves beside what it has to, as kernels and plain.

    python -m grlab.bench.operations

prints it as JSON, in a process that knows the TPU compiler (`measure` is that). No TPU is needed, and no time is
measured: the bytes are those of the compiled program's instructions and kernels, each operand and result once.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from grlab import cost, hlo, traffic
from grlab.chips import CHIPS, COMPILER_ENV
from grlab.errors import UsageError
from grlab.ops import gated, manifold, streams, tpu
from grlab.train.flops import of_jaxpr

CHIP, TOPOLOGY = "v5p", "v5p:2x2x1"
B, T, N, D = 4, 4096, 4, 2560  # bfloat16
R, O = D // 8, N * (N + 2)
EPS = 1e-6


class Operation(NamedTuple):
    """A function of arrays, and which of them it has gradients of."""

    call: Callable
    args: tuple[jax.ShapeDtypeStruct, ...]
    learned: tuple[int, ...]


def operations() -> dict[str, Operation]:
    """GR's and mHC's, at B · T = 16,384 tokens, N = 4 and D = 2560."""

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    stream, y = array(B, T, N, D, dtype=jnp.bfloat16), array(B, T, D, dtype=jnp.bfloat16)
    s, res = array(B, T, N), array(B, T, N, N)
    of_gr = (array(N, D), array(N * D, R), array(R, N * D), array(N * D, N))
    of_mhc = (array(N * D, O), array(O), array(O), array(D))
    settings = {"eps": EPS, "reach": 1.0, "dtype": jnp.bfloat16}

    def read(*args):
        return gated.read(*args, **settings)

    def write_read(*args):
        return gated.write_read(*args, **settings)

    def write(stream_BxTxNxD, s_BxTxN, y_BxTxD, *h_BxTxNxN):
        return streams.write(stream_BxTxNxD, s_BxTxN[..., None], y_BxTxD, *h_BxTxNxN)

    found = {
        "GR read": Operation(read, (stream, *of_gr), tuple(range(5))),
        # The gradient of the streams is the cotangent itself: nothing to compute.
        "GR write": Operation(write, (stream, s, y), (1, 2)),
        "GR write and read": Operation(write_read, (stream, s, y, *of_gr), tuple(range(7))),
        "mHC write": Operation(write, (stream, s, y, res), tuple(range(4))),
    }
    for name, v4_eps in (("mHC read", None), ("mHC read (DeepSeek-V4)", 1e-6)):
        of_read = manifold.Settings(EPS, EPS, 20, v4_eps, jnp.dtype(jnp.bfloat16))
        call = lambda *args, of_read=of_read: manifold.read(*args, of_read)  # noqa: E731
        found[name] = Operation(call, (stream, *of_mhc), tuple(range(5)))
    return found


def measure() -> dict[str, dict]:
    """{operation: `_facts`}, found in a process of its own.

    Raises UsageError where there is no TPU compiler.
    """
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | COMPILER_ENV
    done = subprocess.run([sys.executable, "-m", __name__], env=env, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise UsageError("--parts", "operations", done.stderr.splitlines()[-1])
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _facts(operation: Operation) -> dict:
    """Of the operation and of its derivative: kernels, bytes moved and to be moved, temporaries, FLOPs.

    To be moved are, forward, the arguments and the results, and in the derivative the arguments again, the cotangents
    of the results and the gradients.
    """
    call, args, learned = operation

    def both(args, cotangents):
        def of_learned(*xs):
            return call(*(xs[learned.index(i)] if i in learned else x for i, x in enumerate(args)))

        out, vjp = jax.vjp(of_learned, *(args[i] for i in learned))
        return out, vjp(cotangents)

    out = jax.eval_shape(call, *args)
    grads = [args[i] for i in learned]
    again = args if len(learned) == len(args) else grads
    with_kernels = [_compiled(call, args), _compiled(both, (args, out))]
    with tpu.without_kernels():
        plain = [_compiled(call, args), _compiled(both, (args, out))]
    floor = _bytes(args, out), _bytes(again, out, grads)
    moved, plain_moved = ((f["moved"], b["moved"] - f["moved"]) for f, b in (with_kernels, plain))
    return {
        "kernels": [with_kernels[0]["kernels"], with_kernels[1]["kernels"] - with_kernels[0]["kernels"]],
        "floor_bytes": floor,
        "moved_bytes": list(moved),
        "plain_moved_bytes": list(plain_moved),
        "temporary_bytes": [x["temporaries"] for x in with_kernels],
        "plain_temporary_bytes": [x["temporaries"] for x in plain],
        "flops": [_flops(call, args), _flops(both, (args, out)) - _flops(call, args)],
    }


def _compiled(f, args) -> dict:
    # The compiler chooses how arguments lie in memory, as it does inside a larger program.
    auto = Format(Layout.AUTO, SingleDeviceSharding(cost.topology(TOPOLOGY).devices[0]))
    compiled = jax.jit(lambda *args: f(*args), in_shardings=auto, out_shardings=auto).lower(*args).compile()
    text = compiled.as_text()
    return {
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "moved": traffic.moved(hlo.Program(text)).hbm_bytes,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    }


def _flops(f, args) -> float:
    with tpu.without_kernels():
        return of_jaxpr(jax.make_jaxpr(lambda *args: f(*args))(*args).jaxpr)  # of f itself JAX knows its program


def _bytes(*arrays) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def lines(found: dict[str, dict]) -> list[list[str]]:
    """The table's: of each operation, forward and derivative."""
    chip, table = CHIPS[CHIP], []
    for name, facts in found.items():
        for k, direction in enumerate(("", " derivative")):
            floor, moved, plain = (facts[f"{of}_bytes"][k] for of in ("floor", "moved", "plain_moved"))
            at_peak, at_bandwidth = facts["flops"][k] / chip.peak_flops, floor / chip.hbm_bandwidth
            temporaries, plain_temporaries = (facts[f"{of}temporary_bytes"][k] / 2**20 for of in ("", "plain_"))
            table.append(
                [
                    name + direction,
                    str(facts["kernels"][k]),
                    f"{floor / 1e6:,.0f}",
                    f"{moved / floor:.2f}",
                    f"{plain / floor:.2f}",
                    f"{temporaries:,.0f}",
                    f"{plain_temporaries:,.0f}",
                    f"{1e3 * at_bandwidth:.2f} + {1e3 * at_peak:.2f}",
                ]
            )
    return table


TITLE = (
    f"An operation on a chip of {CHIP}, compiled: {B * T:,} tokens, width {D}, {N} streams, bfloat16; bytes moved are "
    "times the floor"
)
HEADER = ["", "kernels", "MB, floor", "moved", "plain", "MiB held", "plain", "ms, HBM + FLOPs"]


if __name__ == "__main__":
    try:
        print(json.dumps({name: _facts(operation) for name, operation in operations().items()}))
    except UsageError as e:  # there is no TPU compiler
        print(f"{e.remedy}", file=sys.stderr)
        sys.exit(2)
