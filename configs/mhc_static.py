"""mHC, static maps: the dynamic term removed, only the biases learned (the report's "static" row: λ = 0).

    python launch.py train --config=configs/mhc_static.py:cpu --workdir=runs/mhc_static-0

About 8 minutes of training on one core of a Xeon, by the CPU time of a step.
Held-out loss 1.189 ± 0.006 over 3 seeds (experiments/results/table5_cpu).

Sets beside `residual`: optim.lr, from the learning-rate sweep of all rows of Table 5 (experiments/lr_table5.py).
"""

from configs import mhc

LR = {"cpu": 7e-3}  # the best of experiments/lr_table5.py; other scales keep theirs


def get_config(scale: str = "cpu"):
    config = mhc.get_config(scale)
    config.optim.lr = LR.get(scale, config.optim.lr)
    config.row = "mhc_static"
    config.residual.dynamic = False
    return config
