"""The design axes of GR, one switch at a time, and the path from static HC to GR.

    python launch.py sweep --experiment=experiments/axes.py --scale=cpu --seeds=2 --runs=runs/axes
    python launch.py table --experiment=experiments/axes.py --runs=runs/axes --out=experiments/results/axes_cpu

The report names the axes (arXiv 2608.30320, section 2.2) and publishes no numbers for them. The baseline is GR; a
row of GR differs from it in the fields that its label names, the rows of other systems in `residual` and in their own
learning rate.
"""

from grlab.experiment import Experiment, Row


def _gr(name: str, label: str, **switches: object) -> Row:
    return Row(name, "configs/gr.py", label, {f"residual.{field}": value for field, value in switches.items()})


EXPERIMENT = Experiment(
    name="axes",
    title="The design axes of GR",
    baseline="gr",
    rows=(
        _gr("gr", "GR"),
        _gr("gate_tanh", "1 gate: tanh", gate="tanh"),
        _gr("gates_static", "2 gates: static", gates="static"),
        _gr("read_scalar", "3 read: scalar", read="scalar"),
        _gr("write_channel", "4 write: channel", write="channel"),
        _gr("gate_input_last", "5 gates from the last stream", gate_input="last"),
        _gr("gate_input_pooled", "5 gates from pooled streams", gate_input="pooled"),
        _gr("norm_joint", "5 norm: joint", norm="joint"),
        _gr("norm_shared", "5 norm: one gain", norm="shared_gain"),
        _gr("mix_free", "6 H_res: free", mix="free"),
        _gr("mix_sinkhorn", "6 H_res: doubly stochastic", mix="sinkhorn"),
        _gr("static_term", "7 static term", static_term=True),
        _gr("top_2", "8 read of the top 2", top_k=2),
        _gr("float8", "9 streams in FP8", stream_dtype="float8_e4m3fn"),
        Row("width_only", "configs/width_only.py", "10 width only, from the home stream"),
        Row("width_only_mean", "configs/width_only.py", "10 width only, from the mean", {"residual.read_init": "mean"}),
        Row("prenorm", "configs/prenorm.py", "Pre-norm"),
        _gr("gate_range_2", "read gate in (0, 2)", gate_range=2),
        _gr("init_std", "gates that start as at d = 2560", init_std=0.125),  # 1/√d at the width 64 of the scale cpu
        # The path: HC's streams without its dynamic maps, without H_res, with GR's gates and norm, then what follows.
        Row("hc_static", "configs/hc_static.py", "path: HC, static"),
        Row("hc_identity", "configs/hc_static.py", "path: without H_res", {"residual.mix": "frozen"}),
        _gr("gr_static_scalar", "path: GR's norm and gates, static, scalar", gates="static", read="scalar"),
    ),
    notes=(
        "The published N(0, 0.02) of GR's projections is for d = 2560. At d = 64 its gates start nearly constant; "
        "N(0, 1/d) gives their logits the spread that they have there (0.1 for reads, 0.5 for writes).",
        "A tanh gate is 1 + λ tanh and starts at pre-norm's scale, so compare it with the read gate in (0, 2).",
        "The report's gain of about 0.01 for width only is over pre-norm.",
        "The path from static HC to GR goes on with row 3 (dynamic gates, scalar read) and ends with GR.",
        "All rows of GR are trained at GR's learning rate; those of HC and width only at pre-norm's.",
    ),
)
