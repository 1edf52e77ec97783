"""Identity-HC: dynamic Hyper-Connections whose H_res stays the identity.

    python launch.py train --config=configs/identity_hc.py:cpu --workdir=runs/identity_hc-0

About 11 minutes on one core of a Xeon.
Held-out loss 1.206 at one seed (experiments/results/systems_cpu).

Sets `residual` alone, like configs/hc.py.
"""

from configs import hc


def get_config(scale: str = "cpu"):
    config = hc.get_config(scale)
    config.row = "identity_hc"
    config.residual.mix = "frozen"
    return config
