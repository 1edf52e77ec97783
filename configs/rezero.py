"""ReZero: x + a F(x), a scalar a sublayer that starts at 0, and no norm before the sublayers.

    python launch.py train --config=configs/rezero.py:cpu --workdir=runs/rezero-0

About 7 minutes on one core of a Xeon.
Held-out loss 1.243 at one seed (experiments/results/systems_cpu).

Sets `residual` alone: it had no learning-rate sweep of its own and trains at pre-norm's rate.
"""

from configs import base


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.row = "rezero"
    config.residual = base.residual(
        config,
        "rezero",
        norm="none",  # none | pre: an RMSNorm before each sublayer
    )
    return config
