"""Pre-norm, dynamic mHC and GR around the layers of Qwen3.8-Flash-Next: Gated DeltaNet, gated attention and experts.

    python launch.py sweep --experiment=experiments/hybrid.py --scale=cpu_hybrid --seeds=1 --runs=runs/hybrid --jobs=2
    python launch.py table --experiment=experiments/hybrid.py --runs=runs/hybrid --out=experiments/results/hybrid_cpu

The report compares residuals in such a model alone; experiments/table5.py compares them around dense attention.
"""

from experiments import table5
from grlab.experiment import Experiment

EXPERIMENT = Experiment(
    name="hybrid",
    title="Pre-norm, mHC and GR in a hybrid MoE model",
    baseline="prenorm",
    rows=tuple(table5.EXPERIMENT.row(name) for name in ("prenorm", "mhc", "gr")),
    source=table5.EXPERIMENT.source,
    notes=(
        *table5.EXPERIMENT.notes[:1],
        "No row has had its learning rate swept at the scale cpu_hybrid: all have pre-norm's of the scale cpu.",
        *table5.EXPERIMENT.notes[2:],
    ),
)
