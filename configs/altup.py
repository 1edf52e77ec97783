"""AltUp, recycled: two blocks, of which a sublayer computes on one and predicts the other.

    python launch.py train --config=configs/altup.py:cpu --workdir=runs/altup-0

Sets beside `residual`: optim.lr, pre-norm's (it had no learning-rate sweep of its own).
"""

from configs import base, prenorm


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.optim.lr = prenorm.LR.get(scale, config.optim.lr)
    config.row = "altup"
    config.residual = base.residual(
        "altup",
        streams=2,  # K, the blocks
        select="alternating",  # alternating (by sublayer) | layers (by layer) | same: the block that is computed on
    )
    return config
