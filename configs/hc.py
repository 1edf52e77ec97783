"""Hyper-Connections, dynamic (DHC×4): n streams mixed freely, the maps a tanh of the normalised streams.

    python launch.py train --config=configs/hc.py:cpu --workdir=runs/hc-0

Sets beside `residual`: optim.lr, from the learning-rate sweep that every row went through (experiments/lr_table5.py).
"""

from configs import base


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.row = "hc"
    config.residual = {
        "kind": "hc",
        "streams": 4,  # any n ≥ 1
        "dynamic": True,  # false: the maps are learned constants
        "tanh": True,  # around the dynamic part
        "output_init": "plain",  # plain | times_sqrt_n | over_sqrt_n: initial output projections
        "stream_dtype": "float32",  # float32 | bfloat16
    }
    return config
