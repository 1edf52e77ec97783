"""The scales: the shapes, batch and length that a row is trained at. A scale never touches `residual`."""

import difflib

import ml_collections

SCALES = {
    # Seconds: for tests of the whole path.
    "tiny": {
        "steps": 8,
        "batch_size": 4,
        "seq_len": 32,
        "model": {"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 32, "remat": "none"},
        "optim": {"accumulate": 1},
        "eval": {"every": 4, "tokens": 1024, "batch_size": 8, "cloze_items": 8, "cloze_context": 48},
        "checkpoint": {"every": 4},
    },
    # A minute or two a row on one core: a first look at the whole path.
    "demo": {
        "steps": 300,
        "model": {"layers": 4},
        "eval": {"every": 100, "tokens": 65_536, "cloze_items": 100},
        "checkpoint": {"every": 100},
    },
    # 4.1 M bytes at half a million parameters, about 6 to 16 minutes a row on one core: the tables' scale.
    # The learning rate is pre-norm's best of experiments/lr_table5.py; a row with a sweep of its own replaces it.
    "cpu": {"optim": {"lr": 7e-3}},
}


def apply(config: ml_collections.ConfigDict, scale: str) -> None:
    """Writes the fields of `scale` into `config`; a ValueError names the nearest scale when there is none."""
    if scale not in SCALES:
        near = difflib.get_close_matches(scale, SCALES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"scale={scale!r}: {hint}known scales: {', '.join(SCALES)}")
    config.update(SCALES[scale])
