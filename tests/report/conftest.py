"""Run directories as the training loop leaves them, without training."""

import json
import math

import pytest


@pytest.fixture
def make_run(tmp_path):
    """make_run(row, seed, loss, ...) writes tmp_path/runs/row-seed and returns its path."""

    def make(
        row, seed, loss, *, status="done", steps=100, lr=5e-3, config=(), provenance=(), benchmarks=None, speed=1e3
    ):
        path = tmp_path / "runs" / f"{row}-{seed}"
        path.mkdir(parents=True)
        resolved = {"row": row, "scale": "cpu", "seed": seed, "steps": 100, "batch_size": 2, "seq_len": 8}
        resolved |= {
            "residual": {"kind": row},
            "optim": {"lr": lr, "clip": 1.0},
            "log": {"every": 1},
            "data": {"name": "stdlib"},
        }
        made = {"git_commit": "0123456789abcdef", "git_diff": "", "versions": {"jax": "0.10.2", "flax": "0.12.8"}}
        made |= {"device_kind": "cpu", "device_count": 1, "data_fingerprint": "f1", "resumed": []}
        made |= {"command": f"train {row} {seed}", "run_id": f"{row}{seed}"}
        (path / "config.json").write_text(json.dumps(resolved | dict(config)))
        (path / "provenance.json").write_text(json.dumps(made | dict(provenance)))
        metrics = [{"step": s, "loss": loss + 1 / s} for s in range(1, steps + 1)]
        metrics += [{"step": steps, "eval": "heldout", "loss": loss}]
        (path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
        if status != "unfinished":
            final = {"status": status, "step": steps, "tokens": steps * 16}
            final |= {"val_loss": loss, "val_bpb": loss / math.log(2)}
            final |= {"benchmarks": benchmarks or {"cloze": 0.4, "copy": 0.6}}
            final["benchmark_items"] = dict.fromkeys(final["benchmarks"], 300)
            final["benchmark_chance"] = dict.fromkeys(final["benchmarks"], 0.25)
            final |= {"params": 1000, "flops_per_token": 2e6, "tokens_per_s": speed, "seconds": {"train": 1.0}}
            if status == "diverged":
                final = {k: final[k] for k in ("status", "step", "tokens", "params", "seconds")}
                final["reason"] = "not finite"
            (path / "final_result.json").write_text(json.dumps(final))
        return path

    return make
