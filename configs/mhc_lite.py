"""mHC-lite: H_res is a convex mixture of the permutations of the streams, without Sinkhorn-Knopp.

    python launch.py train --config=configs/mhc_lite.py:cpu --workdir=runs/mhc_lite-0

About 13 minutes on one core of a Xeon.
Held-out loss 1.186 at one seed (experiments/results/systems_cpu).

Sets beside `residual`: optim.lr, like configs/mhc.py.
"""

from configs import mhc


def get_config(scale: str = "cpu"):
    config = mhc.get_config(scale)
    config.row = "mhc_lite"
    config.residual.form = "lite"
    return config
