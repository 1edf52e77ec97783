"""Loss spikes at two to four times the learning rate, with AdamW and Muon: the report's stability study.

    python launch.py sweep --experiment=experiments/stability.py --scale=cpu --seeds=3 --runs=runs/stability
    python launch.py table --experiment=experiments/stability.py --runs=runs/stability

As in the report (arXiv 2608.30320, section 3.3) the learning rate is constant, here after the warm-up of all runs, and
gradients are clipped at 0.5. A rate is a multiple of the row's own with AdamW and a cosine (experiments/lr_table5.py);
GatedNorm has pre-norm's.
"""

from grlab.experiment import Experiment, Row, switches

_SYSTEMS = (  # name, config, label, overrides, multiples of the learning rate with AdamW
    ("prenorm", "configs/prenorm.py", "Pre-norm", {}, (1, 2, 3, 4)),
    ("prenorm_gated", "configs/prenorm.py", "GatedNorm", switches(gated_norm=16), (1, 2, 3, 4)),
    ("gr", "configs/gr.py", "GR", {}, (1, 2, 4)),
)
_OPTIMIZERS = (("adamw", "AdamW"), ("muon", "Muon"))


def _rows():
    for optimizer, optimizer_label in _OPTIMIZERS:
        for name, config, label, overrides, factors in _SYSTEMS:
            for factor in factors if optimizer == "adamw" else (1, 2, 4):
                yield Row(
                    f"{name}_{optimizer}_{factor}x",
                    config,
                    f"{label}, {optimizer_label}, {factor}x",
                    {
                        **overrides,
                        "optim.name": optimizer,
                        "optim.lr_factor": float(factor),
                        "optim.schedule": "constant",
                        "optim.clip": 0.5,
                    },
                    differs=("optim.lr_factor", "optim.name"),
                )


EXPERIMENT = Experiment(
    name="stability",
    title="Stability at high learning rates",
    baseline="prenorm_adamw_1x",
    rows=tuple(_rows()),
    notes=(
        "The report: spikes per 10,000 steps, 25B-A3B, 28 layers: AdamW at 2x 4.3, at 4x 183; Muon with GR 0.2 and 0; "
        "GatedNorm alone takes AdamW at 3x from 32.0 to 3.2.",
        "They are of 19,932 steps of another model: compare the order of the rows, not the rates.",
        "Muon has no learning rate of its own: its updates are scaled to the size of AdamW's, and have AdamW's rates.",
    ),
    stability=True,
)
