"""Held-out documents and their benchmarks, made once, and models to score on them."""

import hashlib
import pathlib
import sysconfig

import pytest

from grlab.evals import python_cloze

ITEMS, CONTEXT = 96, 192  # 96: a multiple of the strata of identifier, bracket and indent


@pytest.fixture(scope="session")
def documents():
    """Files of the standard library, a few dozen by hash of the name."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")) if "test" not in str(path)]
    paths.sort(key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())
    return [path.read_bytes() for path in paths if path.stat().st_size < 40_000][:120]


@pytest.fixture(scope="session")
def benchmarks(documents):
    return python_cloze.build(documents, items=ITEMS, context=CONTEXT, seed=0)
