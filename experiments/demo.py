"""A first look at the whole path, two runs: pre-norm and GR.

    python launch.py sweep --experiment=experiments/demo.py --scale=demo --seeds=1 --runs=runs/demo

One seed says nothing about which row is better: it gives a difference and no interval. Learning rates are not tuned at
this scale.
"""

from grlab.experiment import Experiment, Row

EXPERIMENT = Experiment(
    name="demo",
    title="Pre-norm and GR, a first look",
    baseline="prenorm",
    rows=(Row("prenorm", "configs/prenorm.py", "Pre-norm"), Row("gr", "configs/gr.py", "GR")),
)
