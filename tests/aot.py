"""What the training step of a row of Table 5 comes to on 16 chips of v5e, as JSON; in a process of its own.

    python -m tests.aot gr [FIELD=VALUE ...]
    python -m tests.aot --write     writes tests/goldens/plan.json again, from all four rows

The compiler is told of its target by the environment, before JAX is imported, and takes none of the tests' flags.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from grlab.chips import COMPILER_ENV

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "goldens" / "plan.json"
# Small, and all that a large model's step has. No parameter has an axis of T = 384 or of 2 · T tokens a chip.
T, D, STREAMS, A_CHIP = 384, 256, 4, 2
SMALL = (
    *("mesh.data=2", "mesh.fsdp=8", "batch_size=32", f"seq_len={T}"),
    *("model.layers=4", f"model.width={D}", "model.heads=4", "model.kv_heads=2", "model.ffn=704", "model.vocab=2048"),
)
ITERATIONS = "residual.iterations=2"  # of Sinkhorn-Knopp: 20 take most of the time of the test


def facts(row: str, *overrides: str) -> dict:
    """`_facts` in a process of its own."""
    return json.loads(in_a_process("tests.aot", row, *overrides))


def in_a_process(module: str, *argv: str) -> str:
    """The last line that a module of the tests prints where the TPU compiler is at hand."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")} | COMPILER_ENV
    command = [sys.executable, "-m", module, *argv]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return done.stdout.splitlines()[-1]


def _facts(row: str, overrides: list[str]) -> dict:
    from grlab import config as configs
    from grlab import cost, hlo, parallel, traffic
    from grlab.train.step import make_trainer

    more = [ITERATIONS] if row.startswith("mhc") and row != "mhc_lite" else []
    config = configs.load(f"configs/{row}.py:60m", [*SMALL, *more, *overrides])
    on = cost.topology("v5e:4x4")
    mesh = parallel.make_mesh(config.mesh, on.devices)
    trainer = make_trainer(config, cost.vocabulary(config), mesh)
    program = hlo.Program(cost.compile_step(config, trainer, mesh).as_text())
    moved, unfused = traffic.moved(program), program.unfused()
    collectives = [
        [i.op, [[a.dtype, a.shape] for a in i.arrays if a.shape]]
        for c in program.computations.values()
        for i in c.by_name.values()
        if i.op in traffic.COLLECTIVES and i.phase != "done"
    ]
    return {
        "counts": dict(sorted(moved.counts.items())),
        "sent_bytes": {k: round(v) for k, v in sorted(moved.sent_bytes.items())},
        "hbm_bytes": moved.hbm_bytes,
        "unknown_loops": moved.unknown_loops,
        "collectives": collectives,
        "made": [[a.dtype, a.shape] for i in unfused if i.op not in _NAMES for a in i.arrays],
        "carried": [[a.dtype, a.shape] for i in unfused if i.op == "while" for a in i.arrays],
    }


_NAMES = ("parameter", "get-tuple-element", "tuple", "while", "bitcast")  # of what is there already


def is_stream(shape: list[int], streams: int) -> bool:
    """Whether an array is of the values of a chip's streams, in one layer, by its axes."""
    axes = sorted(n for n in shape if n > 1)
    tokens = ([A_CHIP, T], [A_CHIP * T])
    values = ([streams, D], [streams * D]) if streams > 1 else ([D],)
    return any(axes == sorted(t + v) for t in tokens for v in values)


def golden(found: dict, streams: int) -> dict:
    """What is kept of a row's facts."""
    float32 = sum(dtype == "f32" and is_stream(shape, streams) for dtype, shape in found["made"])
    return {"counts": found["counts"], "sent_bytes": found["sent_bytes"], "float32_streams_made": float32}


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        from tests.rows import TABLE5

        found = {row: golden(facts(row), 1 if row == "prenorm" else STREAMS) for row in TABLE5}
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    else:
        print(json.dumps(_facts(sys.argv[1], sys.argv[2:])))
