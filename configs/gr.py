"""Gated Residuals (GR) as published: channel read, scalar write, dynamic sigmoid gates, no mixing, rank d / 8.

    python launch.py train --config=configs/gr.py:cpu --workdir=runs/gr-0

About 13 minutes on one core of a Xeon.
Held-out loss 1.202 ± 0.007 over 3 seeds (experiments/results/table5_cpu).

Sets beside `residual`: optim.lr, from the learning-rate sweep of all rows of Table 5 (experiments/lr_table5.py).
"""

from configs import base

LR = {"cpu": 1e-2}  # the best of experiments/lr_table5.py; other scales keep theirs


def get_config(scale: str = "cpu"):
    config = base.get_config(scale)
    config.optim.lr = LR.get(scale, config.optim.lr)
    config.row = "gr"
    config.residual = base.residual(
        config,
        "gr",
        streams=4,
        rank=config.model.get_ref("width") // 8,  # of the low-rank gates
        read="channel",  # channel | scalar
        write="scalar",  # scalar | channel
        gates="dynamic",  # dynamic | static
        gate="sigmoid",  # sigmoid | tanh
        gate_range=1,  # 1: a read gate in (0, 1), as published; 2: in (0, 2), so that it starts near 1
        mix="none",  # none | free | sinkhorn | permutations: H_res
        norm="per_stream",  # per_stream | shared_gain | joint
        gate_input="all",  # all | last | pooled: the streams that the gates are predicted from
        static_term=False,  # a learned constant beside the dynamic logits
        init_std=0.02,  # of all projections; 0.02 as published for d = 2560, whose gates 1/√d gives to other widths
        top_k=0,  # streams read for each token; 0: all
        rounding="stochastic",  # stochastic | nearest: of streams stored in float8_e4m3fn
    )
    return config
