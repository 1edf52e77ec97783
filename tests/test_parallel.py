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


def launch(workdir, config, devices: int):
    """Trains in a process of its own on that many devices."""
    config_file = workdir.with_suffix(".json")
    config_file.write_text(json.dumps(config.to_dict()))
    code = (
        "import json, sys; from pathlib import Path; from ml_collections import ConfigDict\n"
        "from grlab.train import loop\n"
        "loop.train(ConfigDict(json.loads(Path(sys.argv[1]).read_text())), sys.argv[2])"
    )
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-c", code, str(config_file), str(workdir)]
    env = os.environ | {"XLA_FLAGS": flags}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def on_a_folder(tmp_path) -> list[str]:
    """The overrides of a run on a small folder of text."""
    fields = ["data.name=folder", f"data.path={rows.data_path(tmp_path)}", "data.glob=*.py", "data.heldout=0.2"]
    fields += [f"data.dir={tmp_path / 'prepared'}", "eval.cloze_items=0", "eval.batch_size=8", "wandb.mode=disabled"]
    return fields


def losses(workdir) -> list[float]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def forget(workdir, *steps: int) -> None:
    """As if the run had been killed before the checkpoints of these steps."""
    for step in steps:
        shutil.rmtree(workdir / "checkpoints" / str(step))
    (workdir / "final_result.json").unlink()


def resumed(workdir) -> list[tuple[int, int]]:
    """(step, devices) of each time the run went on."""
    found = json.loads((workdir / "provenance.json").read_text())
    return [(r["step"], r.get("device_count", found["device_count"])) for r in found["resumed"]]


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
    fields = [*on_a_folder(tmp_path), *more]
    eight, one = rows.tiny(row, *fields, *mesh), rows.tiny(row, *fields)
    launch(tmp_path / "eight", eight, devices=8)
    assert json.loads((tmp_path / "eight" / "provenance.json").read_text())["device_count"] == 8
    loop.train(one, tmp_path / "one")
    np.testing.assert_allclose(losses(tmp_path / "eight"), losses(tmp_path / "one"), rtol=1e-5)

    # The last checkpoint goes, and the one of step 4 is where the other number of devices goes on.
    grown, shrunk = tmp_path / "grown", tmp_path / "shrunk"
    shutil.copytree(tmp_path / "one", grown)
    shutil.copytree(tmp_path / "eight", shrunk)
    for workdir in (grown, shrunk):
        forget(workdir, 8)
    loop.train(one, shrunk)
    launch(grown, eight, devices=8)
    for workdir, devices in ((grown, 8), (shrunk, 1)):
        np.testing.assert_allclose(losses(workdir), losses(tmp_path / "one"), rtol=1e-5)
        assert resumed(workdir) == [(4, devices)]


def test_a_run_moves_from_eight_devices_to_two_and_back(tmp_path):
    """The losses of the run that stayed, within 1e-5; bit for bit those of the run that went on where it was."""
    fields = [*on_a_folder(tmp_path), "checkpoint.every=2", "checkpoint.keep=4"]
    eight = rows.tiny("gr", *fields, *TENSOR)
    two = rows.tiny("gr", *fields, "mesh.data=1", "mesh.fsdp=2")
    stayed, went_on, moved = (tmp_path / name for name in ("stayed", "went_on", "moved"))
    launch(stayed, eight, devices=8)
    for workdir in (went_on, moved):
        shutil.copytree(stayed, workdir)
        forget(workdir, 6, 8)

    launch(went_on, eight, devices=8)
    assert losses(went_on) == losses(stayed) and resumed(went_on) == [(4, 8)]

    launch(moved, two, devices=2)
    forget(moved, 8)
    launch(moved, eight, devices=8)
    np.testing.assert_allclose(losses(moved), losses(stayed), rtol=1e-5)
    assert resumed(moved) == [(4, 2), (6, 8)]


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
