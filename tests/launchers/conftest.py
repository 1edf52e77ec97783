"""A Slurm for the tests, where its programs are installed."""

import pytest

from tests.launchers import slurm_cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A cluster of two cores -> its slurm.conf; skips where there can be none."""
    if why := slurm_cluster.missing():
        pytest.skip(f"no Slurm to test with: {why}")
    with slurm_cluster.running(tmp_path_factory.mktemp("slurm"), cores=2) as conf:
        yield conf
