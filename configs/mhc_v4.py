"""mHC by DeepSeek-V4's formulas: softmax start + eps, combᵀ, and a learned head that weighs the streams at the end.

The sites start as the paper form's do.

    python launch.py train --config=configs/mhc_v4.py:cpu --workdir=runs/mhc_v4-0

About 16 minutes on one core of a Xeon.
Held-out loss 1.182 at one seed (experiments/results/systems_cpu).

Sets beside `residual`: optim.lr, like configs/mhc.py.
"""

from configs import mhc


def get_config(scale: str = "cpu"):
    config = mhc.get_config(scale)
    config.row = "mhc_v4"
    config.residual.form = "deepseek_v4"
    return config
