"""DeepNorm: LayerNorm(α x + F(x)), α and the initial values set by the depth.

    python launch.py train --config=configs/deepnorm.py:cpu --workdir=runs/deepnorm-0

About 7 minutes on one core of a Xeon.
Held-out loss 1.200 at one seed (experiments/results/systems_cpu).

Sets `residual` alone: it had no learning-rate sweep of its own and trains at pre-norm's rate.
"""

from configs import base


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.row = "deepnorm"
    config.residual = base.residual(
        config,
        "deepnorm",
        norm="layer",  # layer | rms
    )
    return config
