"""AltUp, recycled: two blocks, of which a sublayer computes on one and predicts the other.

    python launch.py train --config=configs/altup.py:cpu --workdir=runs/altup-0

About 9 minutes on one core of a Xeon.
Held-out loss 1.191 at one seed (experiments/results/systems_cpu).

Sets `residual` alone: it had no learning-rate sweep of its own and trains at pre-norm's rate.
"""

from configs import base


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.row = "altup"
    config.residual = base.residual(
        config,
        "altup",
        streams=2,  # K, the blocks
        select="alternating",  # alternating (by sublayer) | layers (by layer) | same: the block that is computed on
    )
    return config
