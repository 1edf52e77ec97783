"""What a run writes, how it ends, and the value of a training step.

Seen to fail: a constant learning rate breaks `test_golden_step`; decay on every parameter breaks
`test_weight_decay_moves_only_its_group`; a sum instead of a mean over parts breaks
`test_accumulation_is_the_whole_batch`; a divergence that is noted and not raised breaks
`test_divergence_stops_the_run`.
"""

import json
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
import wandb
from flax import nnx

import launch
from grlab import parallel
from grlab.config import ROOT
from grlab.data import corpus
from grlab.data.batches import heldout_bytes
from grlab.errors import RunFailed, UsageError
from grlab.params import variables
from grlab.train import flops, loop, metrics, optimizer
from grlab.train.checkpoint import Checkpoints
from grlab.train.step import make_trainer
from tests import rows, small_datasets, small_tokenizers

# The loss on one batch before the first update and after the second one on it, at the scale `tiny` with 20 Sinkhorn
# iterations. They may be changed when the model, the initial values or the optimizer are meant to change, and never
# because they got in the way.
GOLDEN = {
    "prenorm": (5.9758844, 5.5754623),
    "mhc_static": (5.9759026, 5.5756812),
    "mhc": (5.9759417, 5.5755529),
    "gr": (5.6827354, 5.4059877),
}


def batch(size=4, length=32):
    tokens_BxT1 = rows.tokens(size, length + 1)
    return {"tokens_BxT": tokens_BxT1[:, :-1], "targets_BxT": tokens_BxT1[:, 1:]}


def trainer_of(config):
    mesh = parallel.make_mesh(config.mesh)
    return make_trainer(config, 256, mesh), parallel.put_batch(batch(), mesh)


@pytest.mark.parametrize("row", rows.TABLE5)
def test_golden_step(row):
    iterations = ["residual.iterations=20"] if row.startswith("mhc") else []
    config = rows.tiny(row, "optim.warmup=1", *iterations)
    trainer, data = trainer_of(config)
    state, losses = trainer.init(), []
    for _ in range(3):
        state, got = trainer.step(state, data)
        losses.append(float(got["loss"]))
    assert (losses[0], losses[2]) == pytest.approx(GOLDEN[row], abs=1e-5)


def test_greedy_is_where_no_other_target_has_fewer_nats():
    trainer, data = trainer_of(rows.tiny("prenorm"))
    params, tokens = trainer.init().params, data["tokens_BxT"]
    nats = np.stack([trainer.nats(params, tokens, np.full_like(tokens, i)) for i in range(256)], axis=-1)
    first = nats.argmin(axis=-1)
    for targets, hits in ((first, 1), ((first + 1) % 256, 0)):
        hit_BxT = np.asarray(trainer.greedy(params, tokens, targets.astype(np.int32)))
        assert hit_BxT.shape == tokens.shape and hit_BxT.dtype == bool and hit_BxT.mean() == hits


def test_accumulation_is_the_whole_batch():
    """Two parts of a batch give the update of the whole batch."""
    results = []
    for parts in (1, 2):
        trainer, data = trainer_of(rows.tiny("gr", "optim.warmup=0", f"optim.accumulate={parts}"))
        state, got = trainer.step(trainer.init(), data)
        results.append((float(got["loss"]), float(got["grad_norm"]), state.params))
    (a, ga, pa), (b, gb, pb) = results
    assert a == pytest.approx(b, rel=1e-5) and ga == pytest.approx(gb, rel=1e-5)
    for x, y in zip(jax.tree.leaves(pa), jax.tree.leaves(pb), strict=True):
        # Adam's first update is lr · sign(g): where g is rounding, its sign is, too.
        assert np.mean(np.abs(np.asarray(x - y)) > 1e-5) < 0.02


@pytest.mark.parametrize("row, name", [(row, "adamw") for row in rows.ROWS] + [("gr", "muon")])
def test_weight_decay_moves_only_its_group(row, name):
    """With a learning rate and no gradient, the decay group shrinks and every other parameter is left."""
    config = rows.tiny(row, "optim.warmup=0", f"optim.name={name}")
    shapes = nnx.state(nnx.eval_shape(lambda: rows.build(config)))
    tx = optimizer.make(config.optim, config.steps, shapes)
    values = np.random.default_rng(0)
    params = jax.tree.map(lambda s: values.standard_normal(s.shape, np.float32), shapes)
    zeros = jax.tree.map(np.zeros_like, params)
    updates = jax.jit(lambda p: tx.update(zeros, tx.init(p), p)[0])(params)
    for variable, p, update in zip(variables(shapes), *map(jax.tree.leaves, (params, updates)), strict=True):
        expected = -config.optim.lr * config.optim.weight_decay * p * variable.decay
        np.testing.assert_allclose(update, expected, rtol=1e-5, atol=1e-9)


def test_a_run_writes_what_the_table_reads(tiny, records, tmp_path):
    config = tiny("gr", "eval.cloze_items=4", "seq_len=64", "eval.cloze_context=64")
    run = tmp_path / "run"
    result = loop.train(config, run)
    assert result == json.loads((run / "final_result.json").read_text())
    assert (result["status"], result["step"], result["tokens"]) == ("done", 8, 8 * 4 * 64)
    assert json.loads((run / "config.json").read_text()) == config.to_dict()
    heldout = [r for r in records(run) if r.get("eval") == "heldout"]
    assert [r["step"] for r in heldout] == [4, 8] and heldout[-1]["loss"] == result["val_loss"]
    scores = {r["eval"]: r["accuracy"] for r in records(run) if "accuracy" in r}
    assert scores == result["benchmarks"] and "indent" in scores
    assert set(result["seconds"]) == {"train", "compile", "eval", "save"}
    params = make_trainer(config, 256, parallel.make_mesh(config.mesh)).abstract.params
    assert result["params"] == sum(x.size for x in jax.tree.leaves(params))
    assert 3.0 < result["val_loss"] < 6.0 and result["tokens_per_s"] > 0
    provenance = json.loads((run / "provenance.json").read_text())
    assert {"git_commit", "versions", "device_kind", "data_fingerprint", "command", "run_id"} <= provenance.keys()


def test_a_run_with_a_tokenizer(tiny, tmp_path, caplog):
    """It is scored in nats a token and bits a byte; the model may have more rows than the tokenizer has ids."""
    file = small_tokenizers.bpe(tmp_path / "bpe.json")
    config = tiny("prenorm", f"data.tokenizer={file}", "model.vocab=400", "eval.cloze_items=4")
    result = loop.train(config, tmp_path / "run")
    read = corpus.load(config.data)
    tokens = min(config.eval.tokens, sum(len(document) + 1 for document in read.heldout))
    text = heldout_bytes(read.heldout_bytes, max_tokens=tokens)
    assert text > 1.02 * tokens
    assert result["val_bpb"] == pytest.approx(result["val_loss"] * tokens / text / np.log(2), rel=1e-9)
    assert result["benchmarks"] == {}
    assert caplog.text.count("the cloze benchmarks are not run") == 1

    mesh = parallel.make_mesh(config.mesh)
    sizes = {rows: make_trainer(config, rows, mesh).abstract.params for rows in (300, 301, 400)}
    params = {rows: sum(x.size for x in jax.tree.leaves(p)) for rows, p in sizes.items()}
    assert result["params"] == params[400] != params[300]
    assert result["flops_per_token"] == flops.per_token(config, 400)
    assert read.vocab_size == 301
    config.model.vocab = 0
    assert loop.train(config, tmp_path / "own")["params"] == params[301]
    config.model.vocab = 300
    with pytest.raises(UsageError, match="^config.model.vocab=300: must be at least the 301 ids of the tokenizer"):
        loop.train(config, tmp_path / "fewer")
    assert not (tmp_path / "fewer").exists()


def piqa_by_hand(config, run):
    """The accuracy of a run's last parameters, one row at a time without padding."""
    trainer, _ = trainer_of(config)
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    params = checkpoints.restore(checkpoints.latest(), trainer.abstract)[0].params
    checkpoints.close()
    correct = 0
    for example in small_datasets.PIQA:
        per_byte = []
        for solution in (example["sol1"], example["sol2"]):
            text = f"Question: {example['goal']}\nAnswer: {solution}".encode()
            row_1xT = np.frombuffer(text, np.uint8).astype(np.int32)[None]
            nats_1xT = np.asarray(trainer.nats(params, row_1xT[:, :-1], row_1xT[:, 1:]))
            per_byte.append(nats_1xT[0, -len(solution) - 1 :].sum() / len(solution))
        correct += np.argmin(per_byte) == example["label"]
    return correct / len(small_datasets.PIQA)


def test_a_run_is_scored_on_the_benchmarks_of_the_field(tiny, records, tmp_path):
    """Beside the cloze ones, in the same records; what cannot be had is said before the run begins."""
    small_datasets.prepare(tmp_path / "data", "piqa", "validation", small_datasets.PIQA)
    small_datasets.prepare(tmp_path / "data", "lambada", "test", [{"passage": "the cat sat"}])
    more = [f"data.dir={tmp_path / 'data'}", "steps=2", "optim.warmup=1", "eval.cloze_items=4", "eval.cloze_context=64"]
    config = tiny("prenorm", *more, "eval.downstream=piqa,lambada", "seq_len=64")
    result = loop.train(config, tmp_path / "run")
    assert list(result["benchmarks"])[-2:] == ["piqa", "lambada"] and "indent" in result["benchmarks"]
    assert result["benchmarks"]["piqa"] == piqa_by_hand(config, tmp_path / "run")
    assert (result["benchmark_items"]["piqa"], result["benchmark_chance"]["piqa"]) == (2, 0.5)
    (record,) = (r for r in records(tmp_path / "run") if r.get("eval") == "piqa")
    assert record["accuracy"] == result["benchmarks"]["piqa"]
    assert (record["items"], record["chance"], record["step"]) == (2, 0.5, 2)

    with pytest.raises(UsageError, match="^seq_len=16: too short for piqa: at least 17"):
        loop.train(tiny("prenorm", *more, "eval.downstream=piqa", "seq_len=16"), tmp_path / "short")
    with pytest.raises(UsageError, match="^eval.downstream='pika': did you mean 'piqa'"):
        loop.train(tiny("prenorm", *more, "eval.downstream=pika"), tmp_path / "misspelt")
    assert not (tmp_path / "short").exists() and not (tmp_path / "misspelt").exists()


def test_rows_of_one_seed_see_the_same_batches(tiny, tmp_path):
    """HC starts as the pre-norm network, so on the same batch its first loss is pre-norm's."""
    first = {}
    for row in ("prenorm", "hc"):
        loop.train(tiny(row, "steps=2", "optim.warmup=1"), tmp_path / row)
        first[row] = json.loads((tmp_path / row / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert first["prenorm"] == pytest.approx(first["hc"], rel=1e-6)


def test_divergence_stops_the_run(tiny, tmp_path):
    """A learning rate that blows up: stopped at the first update that is not finite; the checkpoint before the bad one
    is kept and named, and an update of it is finite."""
    config = tiny("prenorm", "steps=40", "checkpoint.every=1", "optim.lr=1e30", "optim.warmup=2", "optim.clip=1e30")
    run = tmp_path / "run"
    with pytest.raises(RunFailed, match="not finite at step"):
        loop.train(config, run)
    result = json.loads((run / "final_result.json").read_text())
    assert result["status"] == "diverged"
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == result["step"] and None in (last["loss"], last["grad_norm"])

    trainer, data = trainer_of(config)
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    good, bad = result["step"] - 2, result["step"] - 1
    assert (checkpoints.last_to(good), checkpoints.latest()) == (good, bad)
    assert result["reason"].endswith(f"the last good parameters: checkpoint {good}")
    finite = []
    for step in (good, bad):
        _, got = trainer.step(checkpoints.restore(step, trainer.abstract)[0], data)
        finite.append(bool(np.isfinite(got["loss"]) and np.isfinite(got["grad_norm"])))
    checkpoints.close()
    assert finite == [True, False]
    with pytest.raises(RunFailed, match="diverged earlier"):
        loop.train(config, run)


@pytest.mark.parametrize("bad", ["stacks.0.layers.0.ffn.up", "head"])
def test_the_first_bad_gradient_is_named(bad, tiny, tmp_path, monkeypatch, capsys):
    """One parameter's gradient is not finite: the command fails with status 1 and says which."""
    record = loop.Run.record

    def poisoned(self, step, metrics):
        if step == 3:
            squares = [np.nan if name == bad else s for name, s in zip(self.names, metrics["squares"], strict=True)]
            metrics = metrics | {"grad_norm": np.nan, "squares": squares}
        record(self, step, metrics)

    monkeypatch.setattr(loop.Run, "record", poisoned)
    (tmp_path / "config.json").write_text(json.dumps(tiny("prenorm").to_dict()))
    status = launch.main(["train", f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path / 'run'}"])
    assert status == 1
    assert f"not finite at step 3; first bad gradient: {bad};" in capsys.readouterr().err


def test_a_heldout_loss_that_is_not_finite_stops_the_run(tiny, tmp_path, monkeypatch):
    loss = loop.Evaluation.loss
    monkeypatch.setattr(loop.Evaluation, "loss", lambda *a: loss(*a)._replace(nats_per_token=float("inf")))
    reason = "held-out loss not finite at step 4; the last good parameters: no checkpoint before it"
    with pytest.raises(RunFailed, match=reason):
        loop.train(tiny("prenorm"), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints" / "4").exists()


def test_evaluation_does_not_depend_on_its_batch_size(tiny, tmp_path):
    losses = [
        loop.train(tiny("prenorm", "steps=2", "optim.warmup=1", f"eval.batch_size={b}"), tmp_path / str(b))["val_loss"]
        for b in (1, 7, 8)
    ]
    assert max(losses) - min(losses) < 1e-6


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 1},
        {"step": 2},
        {"step": 2, "eval": "heldout"},
        {"step": 2, "eval": "x", "accuracy": 1},
        {"step": 3},
    ]
    file.write_text("".join(json.dumps(r) + "\n" for r in lines) + '{"step": 4, "lo')
    kept = metrics.MetricsFile(file, 2)
    kept.write({"step": 3, "loss": float("nan")})
    kept.close()
    assert [json.loads(line) for line in file.read_text().splitlines()] == [*lines[:3], {"step": 3, "loss": None}]


def test_wandb_offline_asks_nothing_and_failing_stops_nothing(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setattr("builtins.input", None)
    loop.train(tiny("prenorm", "steps=2", "optim.warmup=1", "wandb.mode=auto"), tmp_path / "a")
    assert list((tmp_path / "a" / "wandb").glob("offline-run-*"))

    asked = loop.train(tiny("prenorm", "steps=2", "optim.warmup=1", "wandb.mode=online"), tmp_path / "c")
    assert asked["status"] == "done" and list((tmp_path / "c" / "wandb").glob("offline-run-*"))
    assert "wandb: no key: the run is mirrored offline" in capsys.readouterr().err

    def broken(**kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(wandb, "init", broken)
    result = loop.train(tiny("prenorm", "steps=2", "optim.warmup=1", "wandb.mode=auto"), tmp_path / "b")
    assert result["status"] == "done"
    assert "wandb failed and is off: OSError: no space left" in capsys.readouterr().err


def test_the_groups_are_printed_at_the_start(tiny, tmp_path, capsys):
    loop.train(tiny("gr", "steps=2", "optim.warmup=1"), tmp_path / "run")
    out = capsys.readouterr().out
    assert "weight decay" in out and "no decay" in out and "w_down, w_up, w_write" in out


NO_PLACE = """
import runpy, shutil
from grlab.train import loop
make = loop.Run.save
def save(self):
    shutil.rmtree(self.seeds[0].directory.checkpoints)
    self.seeds[0].directory.checkpoints.write_text("a file where the folder was")
    make(self)
loop.Run.save = save
runpy.run_path("launch.py", run_name="__main__")
"""


def test_a_save_that_failed_is_not_passed_over(tiny, tmp_path):
    """The disk refuses checkpoints: the process ends as failed, at once, with the reason and without a result."""
    (tmp_path / "config.json").write_text(json.dumps(tiny("prenorm").to_dict()))
    command = [sys.executable, "-c", NO_PLACE, "train", f"--config={tmp_path / 'config.json'}"]
    command += [f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 1
    assert "\nfailed: checkpoint of step 4 could not be saved: " in done.stderr
    assert not (tmp_path / "run" / "final_result.json").exists()


def test_a_save_that_fails_in_the_background_stops_the_run_at_the_next_step(tiny, records, tmp_path, monkeypatch):
    """The disk is full when a checkpoint is renamed into place: the run does not train on to the next one."""
    from orbax.checkpoint._src.path import atomicity

    may_fail = threading.Event()

    def full(*args, **kwargs):
        may_fail.wait(60)
        raise OSError("no space left")

    monkeypatch.setattr(atomicity.AtomicRenameTemporaryPath, "finalize", full)
    update = loop.Run.record

    def record(self, step, metrics):
        update(self, step, metrics)
        if step == 5:  # the save fails here, while the next update is under way
            may_fail.set()
            while self.checkpoints._manager.is_saving_in_progress():
                time.sleep(0.01)

    monkeypatch.setattr(loop.Run, "record", record)
    with pytest.raises(RunFailed, match="checkpoint of step 4 could not be saved: .*no space left"):
        loop.train(tiny("prenorm", "steps=40", "eval.every=40"), tmp_path / "run")
    assert [r["step"] for r in records(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_batches_that_do_not_fit_the_mesh_are_one_line(tiny, tmp_path):
    with pytest.raises(UsageError, match="config.mesh='data=3"):
        loop.train(tiny("prenorm", "mesh.data=3"), tmp_path / "run")
