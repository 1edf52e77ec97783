"""How many streams, of what rank, and in how many bits: GR from n = 1 to 8, ranks d/32 to d/2, and FP8.

    python launch.py sweep --experiment=experiments/streams.py --scale=cpu --seeds=3 --runs=runs/streams
    python launch.py table --experiment=experiments/streams.py --runs=runs/streams

n = 1 is pre-norm with GatedNorm, of GR's rank. The ranks are of the width 64 of the scale cpu.
"""

from grlab.experiment import Experiment, Row, switches

GR = "configs/gr.py"

EXPERIMENT = Experiment(
    name="streams",
    title="Streams and ranks of GR",
    baseline="gr",
    rows=(
        Row("gr", GR, "GR: n = 4, rank d/8"),
        Row("n1", "configs/prenorm.py", "n = 1: GatedNorm", switches(gated_norm=8)),
        Row("n2", GR, "n = 2", switches(streams=2)),
        Row("n8", GR, "n = 8", switches(streams=8)),
        Row("rank_2", GR, "rank d/32", switches(rank=2)),
        Row("rank_4", GR, "rank d/16", switches(rank=4)),
        Row("rank_16", GR, "rank d/4", switches(rank=16)),
        Row("rank_32", GR, "rank d/2", switches(rank=32)),
        Row("bf16", GR, "streams in bfloat16", switches(stream_dtype="bfloat16")),
        Row("float8", GR, "streams in FP8, stochastic rounding", switches(stream_dtype="float8_e4m3fn")),
        Row(
            "float8_nearest", GR, "streams in FP8, nearest", switches(stream_dtype="float8_e4m3fn", rounding="nearest")
        ),
    ),
    notes=("n = 1 has the read of GR and not its write gate, and pre-norm's learning rate.",),
)
