"""The learning rates of experiments/table5.py: one grid for every row, so that no row is favoured by its tuning.

    python launch.py sweep --experiment=experiments/lr_table5.py --scale=cpu --seeds=1000, --runs=runs/lr --jobs=2

Each run has 1000 steps, half of the table's at the scale `cpu`, with warm-up and cosine to its own end. Seed 1000 is
not among the seeds of the table (0, 1, 2), so that the rates are not chosen on the runs that are reported. (The comma
makes it a list of one seed; `--seeds=1000` would be a thousand seeds.)
"""

from grlab.experiment import load, rate_grid

GRID = ("7e-3", "1e-2", "5e-3", "1.4e-2")  # factors of √2, run from the middle out until no row's best is at an end
STEPS = 1000

EXPERIMENT = rate_grid(load("experiments/table5.py"), GRID, STEPS)
