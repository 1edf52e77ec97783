"""ReZero: x + a F(x), a scalar a sublayer that starts at 0, and no norm before the sublayers.

    python launch.py train --config=configs/rezero.py:cpu --workdir=runs/rezero-0

Sets beside `residual`: optim.lr, pre-norm's (it had no learning-rate sweep of its own).
"""

from configs import base, prenorm


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.optim.lr = prenorm.LR.get(scale, config.optim.lr)
    config.row = "rezero"
    config.residual = base.residual(
        "rezero",
        norm="none",  # none | pre: an RMSNorm before each sublayer
    )
    return config
