"""Learned scalars: a x + b F(norm x) + c x0, with x0 the embedding.

    python launch.py train --config=configs/scalars.py:cpu --workdir=runs/scalars-0

About 8 minutes on one core of a Xeon.
Held-out loss 1.193 at one seed (experiments/results/systems_cpu).

Sets `residual` alone: it had no learning-rate sweep of its own and trains at pre-norm's rate.
"""

from configs import base


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.row = "scalars"
    config.residual = base.residual(config, "scalars")
    return config
