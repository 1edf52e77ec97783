"""LayerScale: x + λ ⊙ F(norm x), λ a channel's own.

    python launch.py train --config=configs/layerscale.py:cpu --workdir=runs/layerscale-0

Sets beside `residual`: optim.lr, pre-norm's (it had no learning-rate sweep of its own).
"""

from configs import base, prenorm


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.optim.lr = prenorm.LR.get(scale, config.optim.lr)
    config.row = "layerscale"
    config.residual = base.residual(
        "layerscale",
        start=0.1,  # the initial λ; the paper: 0.1 up to depth 18, 1e-5 up to 24, 1e-6 beyond
    )
    return config
