"""The first comparison of the report on GR: pre-norm, static and dynamic mHC, and GR.

    python launch.py sweep --experiment=experiments/table5.py --scale=cpu --seeds=3 --runs=runs/table5
    python launch.py table --experiment=experiments/table5.py --runs=runs/table5 --out=experiments/results/table5

The four rows share everything but `residual` and the learning rate, which is each row's best of the grid of
experiments/lr_table5.py.
"""

from grlab.experiment import Experiment, Row

_COLUMNS = (
    "loss", "MMLU", "MMLU-Pro", "SuperGPQA", "MATH", "GSM8K", "BBH", "MMMLU", "EvalPlus", "MultiPL-E", "average",
)  # fmt: skip


def _published(*figures: float) -> dict[str, float]:
    return dict(zip(_COLUMNS, figures, strict=True))


EXPERIMENT = Experiment(
    name="table5",
    title="Pre-norm, mHC and GR",
    baseline="prenorm",
    rows=(
        Row(
            "prenorm",
            "configs/prenorm.py",
            "Pre-norm",
            published=_published(1.617, 64.29, 38.40, 21.78, 53.92, 77.41, 64.73, 51.26, 49.25, 37.15, 50.91),
        ),
        Row(
            "mhc_static",
            "configs/mhc_static.py",
            "mHC (static)",
            published=_published(1.596, 64.62, 43.69, 22.20, 55.08, 78.05, 65.42, 52.78, 49.59, 40.94, 52.49),
        ),
        Row(
            "mhc",
            "configs/mhc.py",
            "mHC (dynamic)",
            published=_published(1.594, 66.11, 45.84, 24.20, 59.54, 78.51, 66.01, 56.61, 52.16, 41.30, 54.47),
        ),
        Row(
            "gr",
            "configs/gr.py",
            "GR",
            published=_published(1.590, 66.69, 46.02, 23.80, 61.18, 78.20, 66.54, 56.19, 51.36, 42.00, 54.66),
        ),
    ),
    source="arXiv 2608.30320, Table 5: 25B-A3B MoE, 560B tokens, n = 4",
    notes=(
        "Published losses are of another model, tokenizer and corpus, and the published average is of other "
        "benchmarks: compare signs and order, not levels.",
        "Rows are not matched in parameters: at the scale cpu the connections add 21 % (GR) and 23 % (mHC, dynamic) to "
        "pre-norm's.",
        "GR's projections start at N(0, 0.02), as published for d = 2560; at d = 64 that makes its gates start nearly "
        "constant (logits of standard deviation 0.002 for reads, 0.08 for writes, against 0.1 and 0.5).",
        "mHC is its own paper's, which gives no initial values and no end of the streams: both are chosen here, and "
        "the published rows may have others.",
        "Seeds, variance, optimizer, learning rate, batch and data of the published table are not published.",
    ),
)
