"""Pre-norm, the baseline of every table: x + F(RMSNorm(x)).

    python launch.py train --config=configs/prenorm.py:cpu --workdir=runs/prenorm-0

Sets beside `residual`: optim.lr, from the learning-rate sweep of all rows of Table 5 (experiments/lr_table5.py).
"""

from configs import base

LR = {"cpu": 7e-3}  # the best of experiments/lr_table5.py; other scales have the base's


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.optim.lr = LR.get(scale, config.optim.lr)
    config.row = "prenorm"
    config.residual = base.residual("prenorm")
    return config
