"""DeepNorm: LayerNorm(α x + F(x)), α and the initial values set by the depth.

    python launch.py train --config=configs/deepnorm.py:cpu --workdir=runs/deepnorm-0

Sets beside `residual`: optim.lr, pre-norm's (it had no learning-rate sweep of its own).
"""

from configs import base, prenorm


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.optim.lr = prenorm.LR.get(scale, config.optim.lr)
    config.row = "deepnorm"
    config.residual = base.residual(
        "deepnorm",
        norm="layer",  # layer | rms
    )
    return config
