"""Width only (the report's "simplified AltUp"): streams read by learned scalars, each written in its turn.

    python launch.py train --config=configs/width_only.py:cpu --workdir=runs/width_only-0

About 8 minutes on one core of a Xeon.
Held-out loss 1.194 ± 0.004 over 2 seeds (experiments/results/axes_cpu).

Sets `residual` alone: it had no learning-rate sweep of its own and trains at pre-norm's rate.
"""

from configs import base


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.row = "width_only"
    config.residual = base.residual(
        config,
        "width_only",
        streams=4,
        read_init="home",  # home | mean: the scalars start as e_{k mod n}, or as 1/n
    )
    return config
