"""Post-norm, the original Transformer's connection: LayerNorm(x + F(x)).

    python launch.py train --config=configs/postnorm.py:cpu --workdir=runs/postnorm-0

Sets beside `residual`: optim.lr, pre-norm's (it had no learning-rate sweep of its own).
"""

from configs import base, prenorm


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.optim.lr = prenorm.LR.get(scale, config.optim.lr)
    config.row = "postnorm"
    config.residual = base.residual(
        "postnorm",
        norm="layer",  # layer | rms
    )
    return config
