"""Configs of real runs that take seconds: a folder of text, the scale `tiny`, no wandb."""

import json

import pytest

from tests import rows


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder of small text files and a place for what is prepared from it."""
    root = tmp_path_factory.mktemp("corpus")
    return rows.data_path(root), root / "prepared"


@pytest.fixture
def overrides(text):
    """The command-line overrides of a run of seconds, without benchmarks."""
    folder, prepared = text
    return [
        "data.name=folder",
        f"data.path={folder}",
        "data.glob=*.py",
        f"data.dir={prepared}",
        "data.heldout=0.2",
        "eval.cloze_items=0",
        "wandb.mode=disabled",
    ]


@pytest.fixture
def tiny(overrides):
    """tiny(row, override, ...) -> the resolved config."""
    return lambda row, *more: rows.tiny(row, *overrides, *more)


@pytest.fixture
def records():
    """records(workdir) -> metrics.jsonl without what differs from run to run: the speed."""

    def read(workdir):
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_s"} for line in lines]

    return read
