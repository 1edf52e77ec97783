"""Compiled programs are kept, and a run of another seed compiles none anew.

Seen to fail: `keep` left out of the command: nothing is kept.
"""

import json
import os
import subprocess
import sys

import jax

from grlab import compiled
from grlab.config import ROOT
from tests import rows


def test_another_seed_finds_every_program(tmp_path):
    fields = [
        "steps=2",
        "optim.warmup=1",
        "data.name=folder",
        f"data.path={rows.data_path(tmp_path)}",
        "data.glob=*.py",
    ]
    fields += ["data.heldout=0.2", f"data.dir={tmp_path / 'prepared'}", "eval.cloze_items=0", "wandb.mode=disabled"]
    kept = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    env = kept | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    found = []
    for seed in range(2):
        config = rows.tiny("gr", *fields, f"seed={seed}")
        file = tmp_path / f"{seed}.json"
        file.write_text(json.dumps(config.to_dict()))
        command = [sys.executable, "launch.py", "train", f"--config={file}", f"--workdir={tmp_path / f'run-{seed}'}"]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        folder = tmp_path / "grlab" / "compiled"
        found.append({p.name for p in folder.rglob("*-cache")})
    assert any("step" in name for name in found[0])
    assert found[1] == found[0]


def test_a_folder_that_is_given_is_kept(monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", before)
    compiled.keep()
    assert jax.config.jax_compilation_cache_dir == before
