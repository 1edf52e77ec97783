"""Every residual connection that has a config, in one table; a new one is in it by being there.

    python launch.py sweep --experiment=experiments/systems.py --scale=cpu --seeds=3 --runs=runs/systems
    python launch.py table --experiment=experiments/systems.py --runs=runs/systems

The rows share everything but `residual` and the learning rate: GR and mHC have their own of experiments/lr_table5.py,
the others pre-norm's.
"""

from grlab.config import ROOT
from grlab.experiment import Experiment, Row

_FOUND = {file.stem for file in (ROOT / "configs").glob("*.py")} - {"base", "scales"}
_NAMES = ["prenorm", *sorted(_FOUND - {"prenorm"})]

EXPERIMENT = Experiment(
    name="systems",
    title="Every residual connection",
    baseline="prenorm",
    rows=tuple(Row(name, f"configs/{name}.py", name) for name in _NAMES),
    notes=(
        "GR and mHC have learning rates of their own; the others are trained at pre-norm's and may be worth more at "
        "theirs: `rate_grid` of grlab/experiment.py makes the sweep.",
        "Post-norm and DeepNorm are made for longer warm-ups and lower rates than pre-norm's.",
    ),
)
