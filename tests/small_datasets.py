"""Datasets of a few hand-written examples, prepared by TFDS's own builders under their own names and features."""

from pathlib import Path
from unittest import mock

import tensorflow_datasets as tfds
import tensorflow_datasets.text  # noqa: F401  registers them without TensorFlow

from grlab.data import text_files


def prepare(root: Path, name: str, split: str, examples: list[dict]) -> None:
    """Prepares the dataset `name` under `root`, with one split, of `examples`."""
    with text_files.quiet():
        builder = tfds.builder(name, data_dir=root)
        splits = {split: iter(list(enumerate(examples)))}
        with mock.patch.object(type(builder), "_split_generators", lambda self, manager: splits):
            builder.download_and_prepare(file_format="array_record")


PIQA = [
    {"id": "0", "goal": "To dry a cup,", "sol1": "no", "sol2": "wipe it", "label": 1},
    {"id": "1", "goal": "To light a lamp,", "sol1": "turn its switch", "sol2": "eat", "label": 1},
]
