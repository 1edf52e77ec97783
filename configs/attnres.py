"""Attention Residuals (AttnRes), full: a sublayer attends over every output before it.

    python launch.py train --config=configs/attnres.py:cpu --workdir=runs/attnres-0

Sets beside `residual`: optim.lr, pre-norm's (it had no learning-rate sweep of its own).
"""

from configs import base, prenorm


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.optim.lr = prenorm.LR.get(scale, config.optim.lr)
    config.row = "attnres"
    config.residual = base.residual(
        "attnres",
        block=1,  # S, sites a block; 1: full
    )
    return config
