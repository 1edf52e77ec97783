"""Pre-norm, the baseline of every table: x + F(RMSNorm(x)).

    python launch.py train --config=configs/prenorm.py:cpu --workdir=runs/prenorm-0

Sets `residual` alone: the learning rate of a scale is this row's.
"""

from configs import base


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.row = "prenorm"
    config.residual = base.residual("prenorm")
    return config
