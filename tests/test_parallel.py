"""A mesh of devices gives the run of one device, and its checkpoints restore on another number of them.

Seen to fail: every device given the first rows of the batch instead of its own; a matrix of the experts of one device
without its gradient.
"""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from grlab import parallel
from grlab.config import ROOT
from grlab.errors import UsageError
from grlab.train import loop
from tests import rows

DEVICES = "--xla_force_host_platform_device_count=8"


def launch(workdir, config_file, devices: bool):
    """Trains in a process of its own, on 8 devices or on one."""
    code = (
        "import json, sys; from pathlib import Path; from ml_collections import ConfigDict\n"
        "from grlab.train import loop\n"
        "loop.train(ConfigDict(json.loads(Path(sys.argv[1]).read_text())), sys.argv[2])"
    )
    env = os.environ | ({"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {DEVICES}"} if devices else {})
    command = [sys.executable, "-c", code, str(config_file), str(workdir)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


TENSOR = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
EXPERT = ("mesh.data=2", "mesh.fsdp=2", "mesh.expert=2")
CASES = [
    ("gr", TENSOR, ()),
    ("mhc", TENSOR, ()),
    ("attnres", TENSOR, ("optim.name=muon",)),
    ("gr", EXPERT, rows.HYBRID_MILD),
]


@pytest.mark.parametrize("row, mesh, more", CASES, ids=["gr", "mhc", "attnres-muon", "gr-hybrid"])
def test_eight_devices_train_as_one_and_checkpoints_go_from_one_to_the_other(row, mesh, more, tmp_path):
    """data 2 × fsdp 2 × tensor or expert 2: the same losses within 1e-5; a checkpoint of 8 devices goes
    on on one, and one of one device on 8."""
    data = ["data.name=folder", f"data.path={rows.data_path(tmp_path)}", "data.glob=*.py", "data.heldout=0.2"]
    data += [
        f"data.dir={tmp_path / 'prepared'}",
        "eval.cloze_items=0",
        "wandb.mode=disabled",
        "eval.batch_size=8",
        *more,
    ]
    eight = rows.tiny(row, *data, *mesh)
    (tmp_path / "eight.json").write_text(json.dumps(eight.to_dict()))
    done = launch(tmp_path / "eight", tmp_path / "eight.json", devices=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "eight" / "provenance.json").read_text())["device_count"] == 8

    one = rows.tiny(row, *data)
    loop.train(one, tmp_path / "one")

    def losses(name):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    np.testing.assert_allclose(losses("eight"), losses("one"), rtol=1e-5)

    # The last checkpoint goes, and the one of step 4 is where the other number of devices goes on.
    shutil.copytree(tmp_path / "one", tmp_path / "grown")
    shutil.copytree(tmp_path / "eight", tmp_path / "shrunk")
    for name in ("grown", "shrunk"):
        shutil.rmtree(tmp_path / name / "checkpoints" / "8")
        (tmp_path / name / "final_result.json").unlink()
    loop.train(one, tmp_path / "shrunk")
    done = launch(tmp_path / "grown", tmp_path / "eight.json", devices=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, devices in (("grown", 8), ("shrunk", 1)):
        np.testing.assert_allclose(losses(name), losses("one"), rtol=1e-5)
        resumed = json.loads((tmp_path / name / "provenance.json").read_text())["resumed"]
        assert (resumed[0]["step"], resumed[0]["device_count"]) == (4, devices)


@pytest.mark.parametrize("row, kind", [*((r, "dense") for r in rows.ROWS), *((r, "hybrid") for r in rows.TABLE5)])
def test_a_row_trains_alike_on_every_mesh(row, kind):
    """8 devices in every shape of mesh, and one: the same losses within 1e-5 over 10 steps."""
    command = [sys.executable, "-m", "tests.meshes", row, kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    one = found.pop("one")
    for mesh, losses in found.items():
        np.testing.assert_allclose(losses, one, rtol=1e-5, err_msg=mesh)


def test_a_mesh_that_does_not_fit_is_one_line():
    with pytest.raises(UsageError, match="only one axis can be -1"):
        parallel.make_mesh({"data": -1, "fsdp": -1})
    with pytest.raises(UsageError, match="must multiply to the 1 devices"):
        parallel.make_mesh({"data": 2, "fsdp": 1})
    mesh = parallel.make_mesh({"data": -1, "fsdp": 1})
    parallel.check_batch(3, 1, mesh)
