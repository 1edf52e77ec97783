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

import grain
import jax
import numpy as np
from ml_collections import ConfigDict

from grlab import distributed, parallel
from grlab.config import flatten, parse_seeds
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


class Seed:
    """One seed of a run: its directory, and everything that is written there."""

    def __init__(self, config: ConfigDict, workdir: str | Path):
        """Raises UsageError when `workdir` holds another run, or things that are no run."""
        self.config, self.workdir = config, Path(workdir)
        self.directory = RunDir(workdir, config)
        self.label = f"{config.row}-{config.seed}"
        self.result = distributed.from_first(self.directory.result)  # None: under way
        self.checkpoints: Checkpoints
        self.batches: grain.MapDataset
        self.metrics: MetricsFile
        self.wandb: Wandb | None = None

    def claim(self) -> None:
        """Makes the directory this run's, and looks for its checkpoints."""
        distributed.from_first(self.directory.claim)
        self.checkpoints = Checkpoints(self.directory.checkpoints, self.config.checkpoint.keep)

    def open(self, fingerprint: str, step: int) -> None:
        """Goes on with the records from `step` on."""
        provenance = distributed.from_first(lambda: self.directory.open_provenance(fingerprint=fingerprint, step=step))
        self.metrics = MetricsFile(self.directory.metrics, step)
        self.wandb = Wandb(self.config, provenance["run_id"], self.directory.path)

    def has_heldout_record(self, step: int) -> bool:
        """Whether the held-out loss of `step` is on record."""
        return any(r["step"] == step and r.get("eval") == "heldout" for r in self.metrics.records)

    def finish(self, result: dict) -> None:
        """Its end: the result is written last."""
        self.close(alone=False)
        self.result = result
        if distributed.first():
            self.directory.finish(result)
        self.wandb.finish(result)

    def close(self, alone: bool) -> None:
        """Ends what is open, and waits for the checkpoint under way, unless that takes processes that are gone."""
        self.metrics.close()
        if not alone:
            self.checkpoints.close()


class Run:
    """A run that is under way: its state, and the seeds that it is of: one, or several trained in one program."""

    def __init__(self, config: ConfigDict, seeds: list[Seed], stop: StopSignal):
        """`config` is that of every seed but for the seed; with `config.seeds` the state has an axis of them."""
        self.config, self.seeds, self.stop = config, seeds, stop
        self.clock = Clock(stop)
        self.mesh = mesh = parallel.make_mesh(config.mesh)
        parallel.check_batch(config.batch_size, config.optim.accumulate, mesh)
        parallel.check_batch(config.eval.batch_size, 1, mesh, "config.eval.batch_size")
        self.together = [seed.config.seed for seed in seeds] if config.seeds else None
        if self.together:
            parallel.check_seeds(self.together, mesh)
        self.corpus = corpora.load(config.data)
        distributed.check_alike({"corpus": self.corpus.fingerprint})
        vocab = _vocab(config.model.vocab, self.corpus)
        self.trainer = make_trainer(seeds[0].config, vocab, mesh, self.corpus.separator, self.together)
        self.share = parallel.share_of(config.batch_size, mesh)
        sizes = {"seq_len": config.seq_len, "batch_size": config.batch_size}
        for seed in seeds:
            order = seed.config.seed
            seed.batches = data.train_batches(self.corpus.train, **sizes, seed=order, rows=self.share.rows)
        self.evaluation = Evaluation(config, self.corpus, mesh, self.trainer.nats, self.trainer.greedy, stop)
        self.tokens_a_step = config.batch_size * config.seq_len
        self.flops_per_token = flops.per_token(config, vocab)
        stop.check()

        for seed in seeds:
            seed.claim()
        self.state, self.step = self.restored()
        for seed in seeds:
            seed.open(self.corpus.fingerprint, self.step)
        label = f"{config.row}-{','.join(map(str, self.together))}" if self.together else seeds[0].label
        self.label, self.progress = label, Progress(label, self.step, config.steps)
        self.waiting: tuple[int, dict] | None = None
        self.word, self.stopping = distributed.Word(mesh), False
        params = self.trainer.of_one.params
        self.names, self.n_params, self.n_active = param_names(params), count(params), count_active(params)

    def restored(self) -> tuple[State, int]:
        """The state and step of the newest checkpoint that all seeds have, or those of the start where none has one.

        Raises UsageError where seeds have checkpoints and no step in common: work would be lost.
        """
        steps = [set(seed.checkpoints.steps()) for seed in self.seeds]
        if not any(steps):
            return self.trainer.init(), 0
        if not (common := set.intersection(*steps)):
            at = ", ".join(
                f"{seed.config.seed}: {max(of, default=0)}" for seed, of in zip(self.seeds, steps, strict=True)
            )
            remedy = f"no checkpoint is of the same step for all of them (seed: step {at}): run each with config.seed"
            raise UsageError("config.seeds", self.config.seeds, remedy)
        step, states = max(common), []
        for seed in self.seeds:
            state, position = seed.checkpoints.restore(step, self.trainer.of_one)
            states.append(state)
        for seed in self.seeds:
            seed.checkpoints.forget_after(step)
        self.clock.seconds |= position.get("seconds", {})
        # The data goes on at the step, too: a batch is a function of (seed, step).
        return self.trainer.join(states), position["step"]

    def under_way(self) -> list[tuple[int, Seed]]:
        """The seeds that have not ended, each with its place in the state."""
        return [(i, seed) for i, seed in enumerate(self.seeds) if seed.result is None]

    def say(self, text: str, label: str = "") -> None:
        self.progress.say(f"{label or self.label}: {text}")

    def heading(self) -> None:
        """Prints what is about to run."""
        c, corpus, shape = self.config, self.corpus, dict(self.mesh.shape)
        self.progress.say(describe_groups(self.config.optim, self.trainer.of_one.params))
        active = f" ({self.n_active:,} of them for a token)" if self.n_active < self.n_params else ""
        self.say(f"{self.n_params:,} parameters{active}, residual {dict(c.residual)}")
        text = f"corpus {corpus.name} ({corpus.fingerprint[:12]}), {len(corpus.train):,} training tokens"
        self.say(f"{text}, mesh {shape}")
        resumed = f", resumed at {self.step}" if self.step else ""
        self.say(f"{c.steps} steps of {self.tokens_a_step:,} tokens{resumed}")

    def train(self) -> None:
        """Updates from the current step to the last one."""
        config, batches = self.config, [data.iterate(seed.batches, self.step) for seed in self.seeds]
        example = self.put([seed.batches[0] for seed in self.seeds])
        step_fn = self.clock.time("compile", lambda: self.trainer.step.lower(self.trainer.abstract, example).compile())
        if self.evaluation_due():
            missing = distributed.from_first(
                lambda: [i for i, seed in self.under_way() if not seed.has_heldout_record(self.step)]
            )
            self.evaluate(missing)  # of the seeds that were stopped in this evaluation
        self.stop.during = "train"
        self.mark = time.perf_counter()
        while self.step < config.steps:
            for _, seed in self.under_way():
                seed.checkpoints.check()
            if self.stopping or (self.stop.requested and not distributed.several()):
                self.settle()
                self.stop.check()
            batch = self.put([next(of_seed) for of_seed in batches])
            with jax.transfer_guard("disallow"):  # what goes to the device or from it is sent by name
                self.state, metrics = step_fn(self.state, batch)
            metrics |= {"stop": self.word.send(self.stop.requested)}
            self.step += 1
            self.settle()
            self.waiting = (self.step, metrics)
            saving = self.step == config.steps or self.step % config.checkpoint.every == 0
            if saving or self.evaluation_due():
                self.settle()  # so that nothing is scored or saved after an update that was not finite
                if self.evaluation_due():
                    self.evaluate([i for i, _ in self.under_way()])
                if saving:
                    self.save()
                self.mark = time.perf_counter()

    def put(self, batches: list):
        """This process's rows of a batch of each seed, as part of the whole ones."""
        if self.together:
            return parallel.put_batches(batches, self.mesh)
        return parallel.put_batch(batches[0], self.mesh, self.share)

    def evaluation_due(self) -> bool:
        """Whether the held-out loss belongs to the current step."""
        return self.step > 0 and (self.step == self.config.steps or self.step % self.config.eval.every == 0)

    def settle(self) -> None:
        """Records the update whose metrics are still on the device, if there is one.

        They are fetched while the next update runs, so that the device never waits for the host.
        """
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            self.record(*waiting)

    def record(self, step: int, metrics: dict) -> None:
        """Waits for update `step` and writes its records; a seed whose update is not finite ends with it."""
        got = jax.device_get(metrics)
        if got.pop("stop"):
            self.stop.follow()
            self.stopping = True
        now = time.perf_counter()
        seconds, self.mark = now - self.mark, now
        self.clock.seconds["train"] += seconds
        speed, losses = self.tokens_a_step / seconds, []
        for i, seed in self.under_way():
            mine = jax.tree.map(lambda x, i=i: x[i], got) if self.together else got
            loss, grad_norm = float(mine["loss"]), float(mine["grad_norm"])
            losses.append(loss)
            finite = np.isfinite(loss) and np.isfinite(grad_norm)
            if step % self.config.log.every == 0 or not finite:
                of_layers = {name: float(value) for name, value in mine.items() if name not in STEP_METRICS}
                lr = float(mine["lr"])
                self.write(seed, step, loss=loss, grad_norm=grad_norm, lr=lr, tokens_per_s=speed, **of_layers)
            if not finite:
                # The loss of update s is that of the parameters of step s − 1.
                what = f"loss or gradient not finite at step {step}; first bad gradient: "
                self.diverged(seed, step, what + first_bad(self.names, mine["squares"]), good=step - 2)
        self.progress.step(step, statistics.fmean(losses), len(losses) * speed)

    def write(self, seed: Seed, step: int, **values) -> None:
        """One record, to metrics.jsonl and to wandb."""
        record = {"step": step, "tokens": step * self.tokens_a_step} | values
        seed.metrics.write(record)
        seed.wandb.log(record)

    def evaluate(self, places: list[int]) -> None:
        """Scores the held-out tokens, for the seeds at these places."""
        for i in places:
            seed = self.seeds[i]
            loss = self.clock.time("eval", self.evaluation.loss, self.trainer.take(self.state, i).params)
            self.write(seed, self.step, eval="heldout", loss=loss.nats_per_token, bpb=loss.bits_per_byte)
            if np.isfinite(loss.nats_per_token):
                self.say(f"step {self.step}, held-out loss {loss.nats_per_token:.4f} nats per token", seed.label)
            else:
                what = f"held-out loss not finite at step {self.step}"
                self.diverged(seed, self.step, what, good=self.step - 1)

    def save(self) -> None:
        """Starts the checkpoints of the current step that there are not, once every record up to it is on the disk."""
        position = {"step": self.step, "seconds": dict(self.clock.seconds)}
        for i, seed in self.under_way():
            if seed.checkpoints.latest() == self.step:
                continue
            seed.metrics.flush()
            self.clock.time("save", seed.checkpoints.save, self.step, self.trainer.take(self.state, i), position)

    def diverged(self, seed: Seed, step: int, text: str, good: int) -> None:
        """Ends a seed at `step`, the parameters of step `good` being the last whose loss is known to be finite.

        Raises Diverged when no other seed is under way.
        """
        checkpoint = seed.checkpoints.last_to(good)
        kept = "no checkpoint before it" if checkpoint is None else f"checkpoint {checkpoint}"
        reason = f"{text}; the last good parameters: {kept}"
        end = {"step": step, "tokens": step * self.tokens_a_step, "reason": reason}
        seed.finish(self.result("diverged") | end)
        if not self.under_way():
            raise Diverged(reason)
        self.say(f"diverged: {reason}", seed.label)

    def finish(self) -> None:
        """The benchmarks and the results of the seeds whose updates are all done."""
        for i, seed in self.under_way():
            scores = self.clock.time("eval", self.evaluation.benchmarks, self.trainer.take(self.state, i).params)
            for name, score in scores.items():
                self.write(seed, self.step, eval=name, accuracy=score.accuracy, items=score.items, chance=score.chance)
                text = f"{name} {score.accuracy:.3f} of {score.items} items (chance {score.chance:.3f})"
                self.say(text, seed.label)
            result = self.result("done")
            if distributed.first():  # it has the records
                heldout = [r for r in seed.metrics.records if r.get("eval") == "heldout"][-1]
                speeds = [r["tokens_per_s"] for r in seed.metrics.records if "tokens_per_s" in r]
                result |= {
                    "val_loss": heldout["loss"],
                    "val_bpb": heldout["bpb"],
                    "benchmarks": {name: score.accuracy for name, score in scores.items()},
                    "benchmark_items": {name: score.items for name, score in scores.items()},
                    "benchmark_chance": {name: score.chance for name, score in scores.items()},
                    "flops_per_token": self.flops_per_token,
                    "tokens_per_s": statistics.median(speeds) if speeds else None,
                }
            seed.finish(result)

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

    def to_its_end(self) -> None:
        """The rest of the run; whatever happens, its files are closed."""
        alone = False
        try:
            self.heading()
            with distributed.together():
                self.train()
                self.finish()
        except Diverged:
            pass  # the results say so
        except distributed.Alone:
            alone = True
            raise
        except Stopped as e:
            if self.step:
                self.save()
            saved = f"at step {self.step}, which is saved" if self.step else "before the first step"
            raise Stopped(e.signum, f"during {self.stop.came_during} {saved}") from None
        finally:
            self.progress.close()
            for _, seed in self.under_way():
                seed.close(alone)


def _vocab(rows: int, corpus: corpora.Corpus) -> int:
    """How many tokens the model is of: `rows` of config.model.vocab, or the corpus's own where that is 0."""
    if 0 < rows < corpus.vocab_size:
        remedy = f"must be at least the {corpus.vocab_size} ids of the tokenizer, or 0 for as many"
        raise UsageError("config.model.vocab", rows, remedy)
    return rows or corpus.vocab_size


class Diverged(Exception):
    """No seed is left whose losses and gradients are finite."""


def train(config: ConfigDict, workdir: str | Path) -> dict:
    """Runs `config` in `workdir` to its end -> the final result.

    Raises:
      UsageError: a config, corpus or workdir that cannot be.
      RunFailed: the run diverged, now or in an earlier call, or a checkpoint could not be written.
      Stopped: a signal ended it.
    """
    return _train(config, [(config, workdir)])[0]


def train_together(config: ConfigDict, workdir: str | Path) -> list[dict]:
    """Runs the seeds of `config.seeds` in one program, seed s in `workdir`-s -> their final results.

    Each directory is that of a run of its seed alone, and may be gone on with as one. Raises what `train` does.
    """
    if distributed.several():
        remedy = "are trained by one process, and there are several: give each seed a run of its own"
        raise UsageError("config.seeds", config.seeds, remedy)
    runs = []
    for seed in parse_seeds("config.seeds", config.seeds):
        of_seed = config.copy_and_resolve_references()
        of_seed.seed, of_seed.seeds, of_seed.mesh.seeds = seed, "", 1
        runs.append((of_seed, f"{str(workdir).rstrip('/')}-{seed}"))
    return _train(config, runs)


def _train(config: ConfigDict, runs: list[tuple[ConfigDict, str | Path]]) -> list[dict]:
    distributed.check_alike({f"config.{field}": value for field, value in flatten(config.to_dict()).items()})
    seeds = [Seed(of_seed, workdir) for of_seed, workdir in runs]
    for seed in seeds:
        if seed.result is not None and seed.result["status"] == "done" and distributed.first():
            loss = f"held-out loss {seed.result['val_loss']:.4f}"
            print(f"{seed.workdir}: done already, {loss}; delete it to run it again")
    when = {seed: "" if seed.result is None else " earlier" for seed in seeds}
    if left := [seed for seed in seeds if seed.result is None]:
        _run(config, left)
    failed = [s for s in seeds if s.result["status"] != "done"]
    if failed:
        raise RunFailed("; ".join(f"{s.workdir}: {s.result['status']}{when[s]}: {s.result['reason']}" for s in failed))
    return [seed.result for seed in seeds]


def _run(config: ConfigDict, seeds: list[Seed]) -> None:
    """Brings the seeds to their ends."""
    stop = StopSignal()
    try:
        with distributed.together():
            run = Run(config, seeds, stop)
        run.to_its_end()
    except RunFailed:
        for seed in seeds:
            if seed.result is None and seed.wandb is not None:
                seed.wandb.finish({"status": "failed"})
        raise
    finally:
        for seed in seeds:
            seed.directory.release()
        stop.restore()
