"""Block Attention Residuals (AttnRes), S = 4: outputs are summed in blocks of four sublayers (two layers).

    python launch.py train --config=configs/attnres_block.py:cpu --workdir=runs/attnres_block-0

About 7 minutes of training on one core of a Xeon, by the CPU time of a step.
Held-out loss 1.192 ± 0.018 over 2 seeds (experiments/results/table6_cpu).

Sets `residual` alone, like configs/attnres.py.
"""

from configs import attnres


def get_config(scale: str = "cpu"):
    config = attnres.get_config(scale)
    config.row = "attnres_block"
    config.residual.block = 4
    return config
