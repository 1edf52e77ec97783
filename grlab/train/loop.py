"""Training: one run from its config to its final result, or from its last checkpoint.

What a run does when its directory already exists:
  1. config.json of another run: refused.
  2. final_result.json: nothing is left to do; the result is printed.
  3. checkpoints: the newest whole one is restored, metrics.jsonl is cut back to its step, and the run goes on there.
  4. none of them: it starts at step 0.
The same command run again after any interruption gives the same parameters, bit for bit, as one that was not stopped.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from grlab import distributed, parallel
from grlab.config import flatten
from grlab.data import batches as data
from grlab.data import corpus as corpora
from grlab.errors import RunFailed, UsageError
from grlab.params import count, count_active
from grlab.train import flops
from grlab.train.checkpoint import Checkpoints
from grlab.train.evaluation import Evaluation
from grlab.train.metrics import MetricsFile, Progress, Wandb
from grlab.train.optimizer import describe_groups
from grlab.train.rundir import RunDir
from grlab.train.signals import Stopped, StopSignal
from grlab.train.step import STEP_METRICS, State, first_bad, make_trainer, param_names


class Clock:
    """Wall seconds spent on each kind of work; a resumed run goes on from those of its checkpoint."""

    def __init__(self, stop: StopSignal):
        self.seconds = dict.fromkeys(("train", "compile", "eval", "save"), 0.0)
        self._stop = stop

    def time(self, kind: str, call: Callable, *args):
        """`call(*args)`, its time added to `kind`, which is also what a signal is told that it came during."""
        start, before, self._stop.during = time.perf_counter(), self._stop.during, kind
        try:
            return call(*args)
        finally:
            self.seconds[kind] += time.perf_counter() - start
            self._stop.during = before


class Run:
    """A run that is under way: its state, and everything that it writes to."""

    def __init__(self, config: ConfigDict, directory: RunDir, stop: StopSignal):
        self.config, self.directory, self.stop = config, directory, stop
        self.clock = Clock(stop)
        mesh = parallel.make_mesh(config.mesh)
        parallel.check_batch(config.batch_size, config.optim.accumulate, mesh)
        parallel.check_batch(config.eval.batch_size, 1, mesh, "config.eval.batch_size")
        self.mesh = mesh
        self.corpus = corpora.load(config.data)
        distributed.check_alike({"corpus": self.corpus.fingerprint})
        vocab = _vocab(config.model.vocab, self.corpus)
        self.trainer = make_trainer(config, vocab, mesh, self.corpus.separator)
        self.share = parallel.share_of(config.batch_size, mesh)
        sizes = {"seq_len": config.seq_len, "batch_size": config.batch_size}
        self.batches = data.train_batches(self.corpus.train, **sizes, seed=config.seed, rows=self.share.rows)
        self.evaluation = Evaluation(config, self.corpus, mesh, self.trainer.nats, self.trainer.greedy, stop)
        self.tokens_a_step = config.batch_size * config.seq_len
        self.label = f"{config.row}-{config.seed}"

        self.flops_per_token = flops.per_token(config, vocab)
        stop.check()

        distributed.from_first(directory.claim)
        self.checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep)
        self.state: State
        if (latest := self.checkpoints.latest()) is None:
            self.state, self.step = self.trainer.init(), 0
        else:
            self.state, position = self.checkpoints.restore(latest, self.trainer.abstract)
            self.step = position["step"]  # where the data goes on, too: a batch is a function of (seed, step)
            self.clock.seconds |= position.get("seconds", {})
        came_from = {"fingerprint": self.corpus.fingerprint, "step": self.step}
        run_id = distributed.from_first(lambda: directory.open_provenance(**came_from))["run_id"]
        self.metrics = MetricsFile(directory.metrics, self.step)
        self.wandb = Wandb(config, run_id, directory.path)
        self.progress = Progress(self.label, self.step, config.steps)
        self.waiting: tuple[int, dict] | None = None
        self.word, self.stopping = distributed.Word(mesh), False
        self.names = param_names(self.state.params)
        self.n_params, self.n_active = count(self.state.params), count_active(self.state.params)

    def say(self, text: str) -> None:
        self.progress.say(f"{self.label}: {text}")

    def heading(self) -> None:
        """Prints what is about to run."""
        c, corpus, shape = self.config, self.corpus, dict(self.mesh.shape)
        self.progress.say(describe_groups(self.config.optim, self.state.params))
        active = f" ({self.n_active:,} of them for a token)" if self.n_active < self.n_params else ""
        self.say(f"{self.n_params:,} parameters{active}, residual {dict(c.residual)}")
        text = f"corpus {corpus.name} ({corpus.fingerprint[:12]}), {len(corpus.train):,} training tokens"
        self.say(f"{text}, mesh {shape}")
        resumed = f", resumed at {self.step}" if self.step else ""
        self.say(f"{c.steps} steps of {self.tokens_a_step:,} tokens{resumed}")

    def train(self) -> None:
        """Updates from the current step to the last one."""
        config, batches = self.config, data.iterate(self.batches, self.step)
        example = self.put(self.batches[0])
        step_fn = self.clock.time("compile", lambda: self.trainer.step.lower(self.trainer.abstract, example).compile())
        if self.evaluation_due() and not distributed.from_first(self.has_heldout_record):
            self.evaluate()  # the run was stopped in this evaluation
        self.stop.during = "train"
        self.mark = time.perf_counter()
        while self.step < config.steps:
            self.checkpoints.check()
            if self.stopping or (self.stop.requested and not distributed.several()):
                self.settle()
                self.stop.check()
            self.state, metrics = step_fn(self.state, self.put(next(batches)))
            metrics |= {"stop": self.word.send(self.stop.requested)}
            self.step += 1
            self.settle()
            self.waiting = (self.step, metrics)
            saving = self.step == config.steps or self.step % config.checkpoint.every == 0
            if saving or self.evaluation_due():
                self.settle()  # so that nothing is scored or saved after an update that was not finite
                if self.evaluation_due():
                    self.evaluate()
                if saving:
                    self.save()
                self.mark = time.perf_counter()

    def put(self, batch):
        """This process's rows of a batch, as part of the whole one."""
        return parallel.put_batch(batch, self.mesh, self.share)

    def evaluation_due(self) -> bool:
        """Whether the held-out loss belongs to the current step."""
        return self.step > 0 and (self.step == self.config.steps or self.step % self.config.eval.every == 0)

    def has_heldout_record(self) -> bool:
        """Whether the held-out loss of the current step is on record."""
        return any(r["step"] == self.step and r.get("eval") == "heldout" for r in self.metrics.records)

    def settle(self) -> None:
        """Records the update whose metrics are still on the device, if there is one.

        They are fetched while the next update runs, so that the device never waits for the host.
        """
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            self.record(*waiting)

    def record(self, step: int, metrics: dict) -> None:
        """Waits for update `step`, writes its record, and raises Diverged if it is not finite."""
        got = jax.device_get(metrics)
        if got.pop("stop"):
            self.stop.follow()
            self.stopping = True
        now = time.perf_counter()
        seconds, self.mark = now - self.mark, now
        self.clock.seconds["train"] += seconds
        loss, grad_norm = float(got["loss"]), float(got["grad_norm"])
        finite = np.isfinite(loss) and np.isfinite(grad_norm)
        if step % self.config.log.every == 0 or not finite:
            of_layers = {name: float(value) for name, value in got.items() if name not in STEP_METRICS}
            speed = self.tokens_a_step / seconds
            self.write(step, loss=loss, grad_norm=grad_norm, lr=float(got["lr"]), tokens_per_s=speed, **of_layers)
        if not finite:
            # The loss of update s is that of the parameters of step s − 1.
            what = f"loss or gradient not finite at step {step}; first bad gradient: "
            raise Diverged(step, what + first_bad(self.names, got["squares"]), good=step - 2)
        self.progress.step(step, loss, self.tokens_a_step / seconds)

    def write(self, step: int, **values) -> None:
        """One record, to metrics.jsonl and to wandb."""
        record = {"step": step, "tokens": step * self.tokens_a_step} | values
        self.metrics.write(record)
        self.wandb.log(record)

    def evaluate(self) -> None:
        """Scores the held-out tokens."""
        loss = self.clock.time("eval", self.evaluation.loss, self.state.params)
        self.write(self.step, eval="heldout", loss=loss.nats_per_token, bpb=loss.bits_per_byte)
        if not np.isfinite(loss.nats_per_token):
            raise Diverged(self.step, f"held-out loss not finite at step {self.step}", good=self.step - 1)
        self.say(f"step {self.step}, held-out loss {loss.nats_per_token:.4f} nats per token")

    def save(self) -> None:
        """Starts a checkpoint of the current step, once every record up to it is on the disk."""
        self.metrics.flush()
        position = {"step": self.step, "seconds": dict(self.clock.seconds)}
        self.clock.time("save", self.checkpoints.save, self.step, self.state, position)

    def finish(self) -> dict:
        """The benchmarks and the result of a run whose updates are all done."""
        scores = self.clock.time("eval", self.evaluation.benchmarks, self.state.params)
        for name, score in scores.items():
            self.write(self.step, eval=name, accuracy=score.accuracy, items=score.items, chance=score.chance)
            self.say(f"{name} {score.accuracy:.3f} of {score.items} items (chance {score.chance:.3f})")
        if not distributed.first():
            return self.result("done")  # the records are with the first process
        heldout = [r for r in self.metrics.records if r.get("eval") == "heldout"][-1]
        speeds = [r["tokens_per_s"] for r in self.metrics.records if "tokens_per_s" in r]
        return self.result("done") | {
            "val_loss": heldout["loss"],
            "val_bpb": heldout["bpb"],
            "benchmarks": {name: score.accuracy for name, score in scores.items()},
            "benchmark_items": {name: score.items for name, score in scores.items()},
            "benchmark_chance": {name: score.chance for name, score in scores.items()},
            "flops_per_token": self.flops_per_token,
            "tokens_per_s": statistics.median(speeds) if speeds else None,
        }

    def result(self, status: str) -> dict:
        """The part of a final result that every end of a run has."""
        return {
            "status": status,
            "step": self.step,
            "tokens": self.step * self.tokens_a_step,
            "params": self.n_params,
            "active_params": self.n_active,
            "seconds": {kind: round(s, 2) for kind, s in self.clock.seconds.items()},
        }

    def close(self, alone: bool) -> None:
        """Ends what is open, and waits for the checkpoints under way, unless that takes processes that are gone."""
        self.progress.close()
        self.metrics.close()
        if not alone:
            self.checkpoints.close()


def _vocab(rows: int, corpus: corpora.Corpus) -> int:
    """How many tokens the model is of: `rows` of config.model.vocab, or the corpus's own where that is 0."""
    if 0 < rows < corpus.vocab_size:
        remedy = f"must be at least the {corpus.vocab_size} ids of the tokenizer, or 0 for as many"
        raise UsageError("config.model.vocab", rows, remedy)
    return rows or corpus.vocab_size


class Diverged(Exception):
    """A loss or a gradient that is not finite, at `step`; the parameters of step `good` still gave finite ones."""

    def __init__(self, step: int, text: str, good: int):
        self.step, self.good = step, good
        super().__init__(text)


def train(config: ConfigDict, workdir: str | Path) -> dict:
    """Runs `config` in `workdir` to its end -> the final result.

    Raises:
      UsageError: a config, corpus or workdir that cannot be.
      RunFailed: the run diverged, now or in an earlier call, or a checkpoint could not be written.
      Stopped: a signal ended it.
    """
    distributed.check_alike({f"config.{field}": value for field, value in flatten(config.to_dict()).items()})
    directory = RunDir(workdir, config)
    if (result := distributed.from_first(directory.result)) is not None:
        if result["status"] != "done":
            raise RunFailed(f"{workdir}: {result['status']} earlier: {result['reason']}")
        if distributed.first():
            print(f"{workdir}: done already, held-out loss {result['val_loss']:.4f}; delete it to run it again")
        return result

    stop, run = StopSignal(), None
    try:
        with distributed.together():
            run = Run(config, directory, stop)
        result = _to_its_end(run)
        if distributed.first():
            directory.finish(result)
    except RunFailed:
        if run is not None:
            run.wandb.finish({"status": "failed"})
        raise
    finally:
        directory.release()
        stop.restore()
    run.wandb.finish(result)
    if result["status"] == "diverged":
        raise RunFailed(f"{workdir}: {result['reason']}")
    return result


def _to_its_end(run: Run) -> dict:
    """The rest of a run -> its result; whatever happens, its files are closed."""
    alone = False
    try:
        run.heading()
        with distributed.together():
            run.train()
            return run.finish()
    except distributed.Alone:
        alone = True
        raise
    except Stopped as e:
        if run.step and run.checkpoints.latest() != run.step:
            run.save()
        saved = f"at step {run.step}, which is saved" if run.step else "before the first step"
        raise Stopped(e.signum, f"during {run.stop.came_during} {saved}") from None
    except Diverged as e:
        good = run.checkpoints.last_to(e.good)
        kept = "no checkpoint before it" if good is None else f"checkpoint {good}"
        reason = f"{e}; the last good parameters: {kept}"
        return run.result("diverged") | {"step": e.step, "tokens": e.step * run.tokens_a_step, "reason": reason}
    finally:
        run.close(alone)
