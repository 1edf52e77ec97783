"""The command line as a user meets it: one clear line and status 2 for every mistake."""

import os
import subprocess
import sys

import pytest

import launch
from grlab.config import ROOT
from tests import rows

TRAIN = ["train", "--config=configs/gr.py:tiny"]
TWO = ["--coordinator=localhost:9911", "--process_id=0", "--processes=2"]
RECORDS = "experiments/results/table5_cpu/records.json"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["trian"], "command='trian': did you mean 'train'?"),
        ([], "(see python launch.py --help)"),
        (["train", "--config=configs/gr.py:tiny"], "--workdir"),
        (["train", "--config=configs/grr.py", "--workdir={tmp}"], "did you mean 'configs/gr.py'?"),
        (["train", "--config=configs/gr.py:tinny", "--workdir={tmp}"], "scale='tinny': did you mean 'tiny'?"),
        ([*TRAIN, "--workdir={tmp}", "--config.optim.lrr=1"], "config.optim='lrr': did you mean 'lr'?"),
        ([*TRAIN, "--workdir={tmp}", "--config.sed=1"], "config='sed': did you mean 'seed'?"),
        ([*TRAIN, "--workdir={tmp}", "--confg.seed=1"], "argument='--confg.seed': did you mean '--config'?"),
        ([*TRAIN, "--workdir={tmp}", "--config.seed=x"], "config.seed='x': must be of type int"),
        ([*TRAIN, "--workdir={tmp}", "--config.seed"], "give it a value"),
        (
            [*TRAIN, "--workdir={tmp}", "--config.seed", "3"],
            "argument='3': what is it the value of? Options are given as --NAME=VALUE",
        ),
        ([*TRAIN, "--workdir={tmp}", "--config.model=3"], "is a group of fields"),
        ([*TRAIN, "--workdir={tmp}", "--config.model.scan=maybe"], "config.model.scan='maybe': must be of type bool"),
        ([*TRAIN, "--workdir={tmp}", "--config.steps=0"], "config.steps=0: must be above 0"),
        ([*TRAIN, "--workdir={tmp}", "--config.batch_size=-4"], "config.batch_size=-4: must be above 0"),
        ([*TRAIN, "--workdir={tmp}", "--config.optim.lr=nan"], "config.optim.lr=nan: must be finite"),
        ([*TRAIN, "--workdir={tmp}", "--config.optim.warmup=8"], "config.optim.warmup=8: must be below steps=8"),
        ([*TRAIN, "--workdir={tmp}", "--config.optim.accumulate=3"], "must divide batch_size=4"),
        ([*TRAIN, "--workdir={tmp}", "--config.wandb.mode=on"], "config.wandb.mode='on'"),
        ([*TRAIN, "--workdir={tmp}", "--config.residual.kind=hcc"], "residual.kind='hcc': did you mean 'hc'?"),
        ([*TRAIN, "--workdir={tmp}", "--config.residual.streams=1"], "residual.streams=1: GR needs at least 2"),
        ([*TRAIN, "--workdir={tmp}", "--config.model.width=-8"], "model.width=-8: must be above 0"),
        ([*TRAIN, "--workdir={tmp}", "--config.data.name=stdlibb"], "did you mean 'stdlib'?"),
        ([*TRAIN, "--workdir={tmp}", "--config.data.name=folder", "--config.data.path={tmp}/none"], "none"),
        (
            [*TRAIN, "--workdir={tmp}", "--config.optim.clip=inf"],
            "optim.clip=inf: must be finite (1e9 clips nothing)\n",
        ),
        ([*TRAIN, "--workdir={tmp}", "--config.model.moe.balance=nan"], "model.moe.balance=nan: must be finite\n"),
        ([*TRAIN, "--workdir={tmp}", "--config.rules.embed=fsd"], "config.rules.embed='fsd': did you mean 'fsdp'?"),
        ([*TRAIN, "--workdir={tmp}", "--config.rules.streams=fsdp"], "the axis of the streams is never split"),
        (["train", "--config=README.md", "--workdir={tmp}"], "--config='README.md'"),
        (["train", "--config={tmp}/none/config.json", "--workdir={tmp}"], "none/config.json': no such file\n"),
        (["train", "--config={tmp}/config.json:tiny", "--workdir={tmp}"], "a run's config has its scale: leave it out"),
        ([*TRAIN, "--workdir=README.md/x"], "README.md is a file: give a directory"),
        ([*TRAIN, "--workdir={tmp}", "--wait=0", *TWO], "--wait=0: must be above 0"),
        ([*TRAIN, "--workdir={tmp}", *TWO[:2], "--processes=0"], "--processes=0: must be above 0"),
        ([*TRAIN, "--workdir={tmp}", *TWO[1:]], "--coordinator='': give it, too"),
        ([*TRAIN, "--workdir={tmp}", *TWO[1:], "--coordinator=:9911"], "must be host:port"),
        ([*TRAIN, "--workdir={tmp}", *TWO[1:], "--coordinator=localhost:99110"], "must be host:port"),
        ([*TRAIN, "--workdir={tmp}", "--config.mesh.data=5"], "config.mesh='data=5"),
        (["table", "--experiment=experiments/tabel6.py", "--runs={tmp}"], "did you mean 'experiments/table6.py'"),
        (["table", "--experiment=experiments/table5.py", "--runs={tmp}"], "no run of table5"),
        (["table", "--experiment=experiments/table5.py", "--runs={tmp}", "--outt=x"], "did you mean '--out'?"),
        (["table", "--experiment=experiments/table5.py", "--runs={tmp}", "--baseline=grr"], "did you mean 'gr'?"),
        (["sweep", "--experiment=experiments/table5.py", "--scale=cpuu", "--runs={tmp}"], "did you mean 'cpu'?"),
        (["sweep", "--experiment=experiments/table5.py", "--scale=tiny", "--runs={tmp}", "--seeds=0"], "seeds='0'"),
        (["sweep", "--experiment=experiments/demo.py", "--scale=tiny", "--runs=README.md"], "is a file"),
        (["table", f"--runs={ROOT / RECORDS}", "--experiment=experiments/table5.py", "--out=README.md"], "is a file"),
        (["sweep", "--experiment=experiments/table5.py", "--scale=tiny", "--runs={tmp}", "--on=slrum"], "on='slrum'"),
        (["sweep", "--experiment=experiments/table5.py", "--scale=tiny", "--runs={tmp}", "--jobs=0"], "--jobs=0"),
        (["sweep", "--experiment=experiments/table5.py", "--scale=tiny", "--runs={tmp}", "--slrum.qos=x"], "--slurm"),
    ],
)
def test_a_mistake_is_one_line(argv, line, tmp_path, capsys):
    status = launch.main([a.replace("{tmp}", str(tmp_path)) for a in argv])
    err = capsys.readouterr().err
    assert status == 2
    assert line in err
    assert err.startswith("error: ") and err.count("\n") == 1


def test_the_door_from_a_shell(tmp_path):
    """Another working directory, a mistake, and --help with an example, in real processes."""
    door = str(ROOT / "launch.py")
    bad = subprocess.run(
        [sys.executable, door, "train", "--config=configs/gr.py:tiny", "--workdir=x", "--config.optim.lrr=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: config.optim='lrr': did you mean 'lr'? known: accumulate, b1, b2, ")
    assert bad.stderr.count("\n") == 1
    for command in ("train", "sweep", "table", "plan", "bench"):
        help_ = subprocess.run([sys.executable, door, command, "--help"], capture_output=True, text=True, check=False)
        assert help_.returncode == 0 and f"example: python launch.py {command} --" in help_.stdout
    assert not (tmp_path / "x").exists()


def test_a_sweep_from_nothing_to_its_table(tmp_path, capfd):
    """Two rows trained by real processes, the table printed; run again, nothing is left to do."""
    folder = tmp_path / "text"
    rows.data_path(tmp_path)
    argv = ["sweep", "--experiment=experiments/demo.py", "--scale=tiny", "--seeds=1", f"--runs={tmp_path / 'runs'}"]
    argv += ["--jobs=1", "--config.data.name=folder", f"--config.data.path={folder}", "--config.data.glob=*.py"]
    argv += [f"--config.data.dir={tmp_path / 'prepared'}", "--config.data.heldout=0.2", "--config.wandb.mode=disabled"]
    assert launch.main(argv) == 0
    out = capfd.readouterr().out
    assert "2 runs, 2 to do" in out and "GR" in out and "nats per byte" in out
    assert launch.main(argv) == 0
    assert "2 runs, 0 to do" in capfd.readouterr().out
    assert (
        launch.main(
            ["table", "--experiment=experiments/demo.py", f"--runs={tmp_path / 'runs'}", f"--out={tmp_path / 'out'}"]
        )
        == 0
    )
    capfd.readouterr()
    runs = f"--runs={tmp_path / 'runs'}"
    assert launch.main(["table", "--experiment=experiments/demo.py", runs, "--baseline=gr"]) == 0
    gr = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("GR "))
    assert "baseline" in gr
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"table.md", "table.csv", "figure.png", "records.json"}


# Seen to fail: printed before the files are written; the error let through; no flush before the end.
@pytest.mark.parametrize(
    ("argv", "unbuffered"),
    [
        (["table", "--runs=experiments/results/table5_cpu/records.json", "--out={tmp}"], "1"),
        (["sweep", "--scale=tiny", "--runs={tmp}", "--dry_run"], ""),
    ],
)
def test_a_reader_that_leaves_costs_nothing(argv, unbuffered, tmp_path):
    command = [sys.executable, "launch.py", *(a.replace("{tmp}", str(tmp_path)) for a in argv)]
    command += ["--experiment=experiments/table5.py"]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=writes, stderr=subprocess.PIPE)
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, b"")
    made = {"table.md", "table.csv", "figure.png", "records.json"} if argv[0] == "table" else set()
    assert {p.name for p in tmp_path.iterdir()} == made
