"""The design axes of GR, one switch at a time, and the path from static HC to GR.

    python launch.py sweep --experiment=experiments/axes.py --scale=cpu --seeds=2 --runs=runs/axes
    python launch.py table --experiment=experiments/axes.py --runs=runs/axes --out=experiments/results/axes_cpu

The report names the axes (arXiv 2608.30320, section 2.2) and publishes a number for one of them (width only). The
baseline is GR; a row of GR differs from it in the fields that its label names, the rows of other systems in `residual`
and in their own learning rate. Axis 5 has one more value in public configs, a plain mean read with y added to every
stream. That is pre-norm, since the streams stay copies.
"""

from grlab.experiment import Experiment, Row, switches

GR = "configs/gr.py"

EXPERIMENT = Experiment(
    name="axes",
    title="The design axes of GR",
    baseline="gr",
    rows=(
        Row("gr", GR, "GR"),
        Row("gate_tanh", GR, "1 gate: tanh", switches(gate="tanh")),
        Row("gates_static", GR, "2 gates: static", switches(gates="static")),
        Row("read_scalar", GR, "3 read: scalar", switches(read="scalar")),
        Row("write_channel", GR, "4 write: channel", switches(write="channel")),
        Row("gate_input_last", GR, "5 gates from the last stream", switches(gate_input="last")),
        Row("gate_input_pooled", GR, "5 gates from pooled streams", switches(gate_input="pooled")),
        Row("norm_joint", GR, "5 norm: joint", switches(norm="joint")),
        Row("norm_shared", GR, "5 norm: one gain", switches(norm="shared_gain")),
        Row("mix_free", GR, "6 H_res: free", switches(mix="free")),
        Row("mix_sinkhorn", GR, "6 H_res: doubly stochastic", switches(mix="sinkhorn")),
        Row("static_term", GR, "7 static term", switches(static_term=True)),
        Row("top_2", GR, "8 read of the top 2", switches(top_k=2)),
        Row("float8", GR, "9 streams in FP8", switches(stream_dtype="float8_e4m3fn")),
        Row("width_only", "configs/width_only.py", "10 width only, from the home stream"),
        Row("width_only_mean", "configs/width_only.py", "10 width only, from the mean", switches(read_init="mean")),
        Row("prenorm", "configs/prenorm.py", "Pre-norm"),
        Row("gate_range_2", GR, "read gate in (0, 2)", switches(gate_range=2)),
        # 1/√d at the width 64 of the scale cpu.
        Row("init_std", GR, "gates that start as at d = 2560", switches(init_std=0.125)),
        # The path: HC's streams without its dynamic maps, without H_res, with GR's gates and norm, then what follows.
        Row("hc_static", "configs/hc_static.py", "path: HC, static"),
        Row("hc_identity", "configs/hc_static.py", "path: without H_res", switches(mix="frozen")),
        Row("gr_static_scalar", GR, "path: GR, static, scalar read", switches(gates="static", read="scalar")),
    ),
    notes=(
        "The published N(0, 0.02) of GR's projections is for d = 2560. At d = 64 its gates start nearly constant; "
        "N(0, 1/d) gives their logits the spread that they have there (0.1 for reads, 0.5 for writes).",
        "A tanh gate is 1 + λ tanh and starts at pre-norm's scale, so compare it with the read gate in (0, 2).",
        "The report gives a gain of about 0.01 for width only (25B-A3B, 400B tokens).",
        "The path from static HC to GR goes on with row 3 (dynamic gates, scalar read) and ends with GR.",
        "All rows of GR are trained at GR's learning rate; those of HC and width only at pre-norm's.",
    ),
)
