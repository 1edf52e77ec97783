"""What rows would cost on TPUs: real ahead-of-time compiles for 16 chips of v5e, and the figures read from them.

Seen to fail: activations not told how they lie on the mesh (GR: streams gathered in float32, 8 times the bytes sent);
the body of a loop counted once (3 times too few bytes sent).
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import pytest

import launch
from grlab import cost
from tests import aot, rows

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install -r requirements-dev.txt"
)
facts = functools.cache(aot.facts)


@needs_libtpu
@pytest.mark.parametrize("row", rows.TABLE5)
def test_a_step_sends_weights_and_keeps_its_streams_at_home(row):
    """Collectives as in the golden file (`python -m tests.aot --write`), none of an activation; streams in bfloat16
    wherever one layer hands them to another or to the backward pass."""
    found, streams = facts(row), 1 if row == "prenorm" else aot.STREAMS
    assert aot.golden(found, streams) == json.loads(aot.GOLDEN.read_text())[row]
    assert found["unknown_loops"] == 0

    for kind, arrays in found["collectives"]:
        for dtype, shape in arrays:
            assert dtype == "s32" or not {aot.T, aot.T * aot.A_CHIP} & set(shape), (kind, dtype, shape)

    def float32_streams(arrays):  # of one layer, or of all of them
        return [a for a in arrays if a[0] == "f32" and any(aot.is_stream(s, streams) for s in (a[1], a[1][1:]))]

    assert not float32_streams(found["carried"])
    kept = [shape for dtype, shape in found["carried"] if dtype == "bf16" and aot.is_stream(shape[1:], streams)]
    assert kept and all(shape[0] == 4 for shape in kept)  # what the backward pass has of each layer's input


@needs_libtpu
def test_a_scan_moves_what_its_layers_would_one_by_one():
    """Bytes sent are equal by kind. Bytes in HBM agree within 2 %: each is scheduled by itself.

    Collectives of small arrays are joined across layers where there is no scan, so that there are fewer of them.
    """
    size = ("model.layers=3", "batch_size=128", "seq_len=1024")
    scan, unrolled = (aot.facts("prenorm", *size, f"model.scan={scan}") for scan in ("true", "false"))
    assert scan["sent_bytes"] == pytest.approx(unrolled["sent_bytes"], rel=1e-3)
    assert scan["hbm_bytes"] == pytest.approx(unrolled["hbm_bytes"], rel=0.02)
    for kind in ("all-gather", "reduce-scatter"):
        assert scan["counts"][kind] == unrolled["counts"][kind]


PLAN = ["plan", "--experiment=experiments/table5.py", "--scale=60m"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--topology=v5g:4x4"], "topology='v5g:4x4': did you mean 'v5p'? known chips: v4, v5e, v5p, v6e"),
        (["--topology=v5e:16"], "topology='v5e:16': give the chips in each of its 2 directions: v5e:4x4"),
        (["--topology=v5e"], "topology='v5e': give the chips in each of its 2 directions: v5e:4x4"),
        (["--topology=v5e:2x2x2"], "give the chips in each of its 2 directions: v5e:4x4"),
        (["--topology=v5p:2x2"], "give the chips in each of its 3 directions: v5p:4x4x4"),
        (["--topology=v5e:16x32"], "must be no larger than the largest slice of v5e, 16x16"),
        pytest.param(["--topology=v5e:3x3"], "the TPU compiler has no such shape", marks=needs_libtpu),
        pytest.param(["--topology=v5e:4x4", "--rows=grr"], "row='grr': did you mean 'gr'?", marks=needs_libtpu),
        pytest.param(
            ["--topology=v5e:4x4", "--config.mesh.data=3"], "must multiply to the 16 devices", marks=needs_libtpu
        ),
        pytest.param(
            ["--topology=v5e:4x4", "--config.batch_size=24"],
            "config.batch_size=24: must be a multiple of mesh.data · mesh.fsdp = 16",
            marks=needs_libtpu,
        ),
        pytest.param(
            ["--topology=v5e:4x4", "--config.model.vocab=0", "--config.data.tokenizer=t.json"],
            "config.model.vocab=0: give how many ids the tokenizer has",
            marks=needs_libtpu,
        ),
    ],
)
def test_a_mistake_is_one_line(argv, line, capsys, monkeypatch):
    for name in launch.COMPILER_ENV:
        monkeypatch.setenv(name, "")  # put back after the command has set it
    assert launch.main([*PLAN, *argv]) == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1 and line in errors[0]


def test_without_the_compiler_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(cost.importlib.util, "find_spec", lambda name: None)
    for name in launch.COMPILER_ENV:
        monkeypatch.setenv(name, "")
    assert launch.main([*PLAN, "--topology=v5e:4x4"]) == 2
    assert "pip install 'jax[tpu]==" in capsys.readouterr().err


@needs_libtpu
def test_the_plan_from_a_shell(tmp_path):
    """Two rows, one of which does not fit: the table says so, and the figures are in the JSON."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    shapes = [f"--config.{field}" for field in aot.SMALL if not field.startswith("residual")]
    command = [sys.executable, "launch.py", *PLAN, "--topology=v5e:4x4", f"--out={tmp_path}", *shapes]

    def run(*argv):
        return subprocess.run([*command, *argv], cwd=aot.ROOT, env=env, capture_output=True, text=True, check=True)

    done = run("--rows=prenorm")
    assert "prenorm (1 of 1): compiling for v5e:4x4" in done.stderr
    record = json.loads((tmp_path / "plan-60m-v5e-4x4.json").read_text())
    row = record["rows"]["prenorm"]
    assert row["fits"] and row["mesh"] == {"data": 2, "fsdp": 8, "tensor": 1, "expert": 1, "seeds": 1}
    assert row["params"] == 4_000_512 and row["connection_params"] == row["connection_flops_per_token"] == 0
    # The state is 12 bytes a parameter, split over the 8 chips of fsdp; gains are whole.
    assert 12 * row["params"] / 8 < row["hbm_bytes"] < 2**27
    assert sum(row["memory"].values()) == row["hbm_bytes"]
    assert row["step_s"] == max(row["compute_s"], row["hbm_s"], row["ici_s"])
    assert row["compute_s"] == pytest.approx(row["flops_per_token"] * 32 * aot.T / 16 / 197e12)
    assert row["chip_hours"] == pytest.approx(16 * 4600 * row["step_s"] / 3600)
    assert record["versions"]["libtpu"] and record["git_commit"]
    assert "Pre-norm" in (tmp_path / "plan-60m-v5e-4x4.md").read_text()

    long = ["--config.seq_len=16384", "--config.batch_size=64", "--config.model.heads=32"]
    done = run("--rows=prenorm", *long)
    assert "[DOES NOT FIT]" in done.stdout and "DOES NOT FIT" in done.stderr
    row = json.loads((tmp_path / "plan-60m-v5e-4x4.json").read_text())["rows"]["prenorm"]
    assert not row["fits"] and row["hbm_bytes"] > 16 * 2**30 and row["step_s"] is None
