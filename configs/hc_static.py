"""Hyper-Connections, static (SHC×4): the maps are learned constants.

    python launch.py train --config=configs/hc_static.py:cpu --workdir=runs/hc_static-0

Sets `residual` alone, like configs/hc.py.
"""

from configs import hc


def get_config(scale: str = "cpu"):
    config = hc.get_config(scale)
    config.row = "hc_static"
    config.residual.dynamic = False
    return config
