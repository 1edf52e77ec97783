"""Hyper-Connections, dynamic (DHC×4): n streams mixed freely, the maps a tanh of the normalised streams.

    python launch.py train --config=configs/hc.py:cpu --workdir=runs/hc-0

About 11 minutes on one core of a Xeon.
Held-out loss 1.181 at one seed (experiments/results/systems_cpu).

Sets `residual` alone: it had no learning-rate sweep of its own and trains at pre-norm's rate, whose network it
is at the start.
"""

from configs import base


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.row = "hc"
    config.residual = base.residual(
        config,
        "hc",
        streams=4,  # any n ≥ 1
        dynamic=True,  # false: the maps are learned constants
        tanh=True,  # around the dynamic part
        read="learned",  # learned | frozen: A_m
        mix="learned",  # learned | frozen: A_r
        write="learned",  # learned | frozen: B
        output_init="plain",  # plain | times_sqrt_n | over_sqrt_n: initial output projections
    )
    return config
