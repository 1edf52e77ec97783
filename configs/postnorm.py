"""Post-norm, the original Transformer's connection: LayerNorm(x + F(x)).

    python launch.py train --config=configs/postnorm.py:cpu --workdir=runs/postnorm-0

About 7 minutes on one core of a Xeon.
Held-out loss 1.202 at one seed (experiments/results/systems_cpu).

Sets `residual` alone: it had no learning-rate sweep of its own and trains at pre-norm's rate.
"""

from configs import base


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.row = "postnorm"
    config.residual = base.residual(
        config,
        "postnorm",
        norm="layer",  # layer | rms
    )
    return config
