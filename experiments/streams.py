"""How many streams, of what rank, and in how many bits: GR from n = 1 to 8, ranks d/32 to d/2, and FP8.

    python launch.py sweep --experiment=experiments/streams.py --scale=cpu --seeds=3 --runs=runs/streams
    python launch.py table --experiment=experiments/streams.py --runs=runs/streams

n = 1 is pre-norm with GatedNorm, of GR's rank. The ranks are of the width 64 of the scale cpu.
"""

from grlab.experiment import Experiment, Row


def _gr(name: str, label: str, **switches: object) -> Row:
    return Row(name, "configs/gr.py", label, {f"residual.{field}": value for field, value in switches.items()})


EXPERIMENT = Experiment(
    name="streams",
    title="Streams and ranks of GR",
    baseline="gr",
    rows=(
        Row("gr", "configs/gr.py", "GR: n = 4, rank d/8"),
        Row("n1", "configs/prenorm.py", "n = 1: GatedNorm", {"residual.gated_norm": 8}),
        _gr("n2", "n = 2", streams=2),
        _gr("n8", "n = 8", streams=8),
        _gr("rank_2", "rank d/32", rank=2),
        _gr("rank_4", "rank d/16", rank=4),
        _gr("rank_16", "rank d/4", rank=16),
        _gr("rank_32", "rank d/2", rank=32),
        _gr("bf16", "streams in bfloat16", stream_dtype="bfloat16"),
        _gr("float8", "streams in FP8, stochastic rounding", stream_dtype="float8_e4m3fn"),
        _gr("float8_nearest", "streams in FP8, nearest", stream_dtype="float8_e4m3fn", rounding="nearest"),
    ),
    notes=("n = 1 has the read of GR and not its write gate, and pre-norm's learning rate.",),
)
