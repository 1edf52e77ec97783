"""Learned scalars: a x + b F(norm x) + c x0, with x0 the embedding.

    python launch.py train --config=configs/scalars.py:cpu --workdir=runs/scalars-0

Sets beside `residual`: optim.lr, pre-norm's (it had no learning-rate sweep of its own).
"""

from configs import base, prenorm


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.optim.lr = prenorm.LR.get(scale, config.optim.lr)
    config.row = "scalars"
    config.residual = base.residual("scalars")
    return config
