"""What a run reports: metrics.jsonl (the source of truth), its mirror in wandb, and lines or a bar on the terminal."""

import json
import math
import os
import sys
import time
from pathlib import Path

from tqdm import tqdm

from grlab import distributed
from grlab.errors import first_line

QUIET_SECONDS = 10  # without a terminal, at most one progress line in this time


class MetricsFile:
    """metrics.jsonl: one JSON object a line. Of several processes only the first has the file."""

    def __init__(self, path: Path, resume_step: int):
        """Keeps the records up to `resume_step`, as a resumed run repeats the later ones."""
        self.records = []
        self._file = None
        if not distributed.first():
            return
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except ValueError:
                    break  # the line that a kill cut short
                # The benchmarks run after the last checkpoint, so they are always run again.
                if record["step"] <= resume_step and "accuracy" not in record:
                    self.records.append(record)
        temporary = path.with_name(".metrics.jsonl.tmp")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in self.records))
        temporary.replace(path)
        self._file = path.open("a", buffering=1)  # a line at a time, for whoever follows the file

    def write(self, record: dict) -> None:
        """Adds a record; a number that JSON does not have becomes null."""
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.records.append(record)
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")

    def flush(self) -> None:
        """Puts all records on the disk: before every checkpoint, so that none is missing after a kill."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flushes and closes the file."""
        if self._file is not None:
            self.flush()
            self._file.close()


class Wandb:
    """The mirror in wandb. It never asks a question, and a wandb that fails is reported once and left alone."""

    def __init__(self, config, run_id: str, workdir: Path):
        mode = config.wandb.mode if distributed.first() else "disabled"  # one writer
        self._run = None
        auto = mode == "auto"
        if auto:
            mode = os.environ.get("WANDB_MODE") or "online"
        if mode == "disabled":
            return
        os.environ.setdefault("WANDB_SILENT", "true")
        if mode == "online":
            if not auto:
                os.environ["WANDB_MODE"] = mode  # or it would look for no key where the user's settings say offline
            if not _has_wandb_key():
                if not auto:
                    print("wandb: no key: the run is mirrored offline; `wandb login` makes one known", file=sys.stderr)
                mode = "offline"
        self._guarded(lambda: self._start(config, mode, run_id, workdir))
        if self._run is None and auto and mode == "online":
            print("wandb: a key and no connection: the run is mirrored offline", file=sys.stderr)
            self._guarded(lambda: self._start(config, "offline", run_id, workdir))

    def _start(self, config, mode: str, run_id: str, workdir: Path) -> None:
        import wandb  # imported late: it takes a second that a disabled run need not spend

        self._run = wandb.init(
            mode=mode,
            id=run_id,
            resume="allow",
            reinit="create_new",  # beside those of other seeds
            dir=str(workdir),
            project=config.wandb.project,
            group=config.wandb.group or None,
            name=f"{config.row}-{config.seed}",
            tags=[config.row, config.scale],
            config=config.to_dict(),
            settings=wandb.Settings(console="off", init_timeout=30),
        )

    def log(self, record: dict) -> None:
        """Mirrors one record."""
        if self._run is not None:
            name = record.get("eval")
            values = {f"{name}/{k}" if name else k: v for k, v in record.items() if k not in ("eval", "step")}
            self._guarded(lambda: self._run.log(values, step=record["step"]))

    def finish(self, result: dict) -> None:
        """Mirrors the final result and ends the run."""
        if self._run is not None:
            self._guarded(lambda: self._run.summary.update(result))
            self._guarded(lambda: self._run.finish(exit_code=0 if result.get("status") == "done" else 1))

    def _guarded(self, call) -> None:
        try:
            call()
        except Exception as e:  # whatever happens in wandb must not end a training run
            self._run = None
            print(f"wandb failed and is off: {first_line(e)}", file=sys.stderr)


def _has_wandb_key() -> bool:
    """Whether wandb finds a key or a token anywhere, without asking for one."""
    try:
        import wandb

        return wandb.login(prompt=False, verify=False)
    except Exception:  # whatever is wrong with wandb, there is no key that serves
        return False


class Progress:
    """A bar with loss, tokens/s and time left on a terminal; elsewhere a plain line now and then."""

    def __init__(self, label: str, first: int, steps: int):
        self._label, self._steps, self._last = label, steps, time.monotonic()
        self._silent = not distributed.first()
        bar = sys.stderr.isatty() and not self._silent
        self._bar = tqdm(total=steps, initial=first, desc=label, unit="step") if bar else None

    def step(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Shows that update `step` is done."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
            self._bar.update(1)
        elif self._silent:
            return
        elif step == self._steps or time.monotonic() - self._last >= QUIET_SECONDS:
            self._last = time.monotonic()
            done = f"{self._label}: step {step}/{self._steps}"
            print(f"{done}, loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s", flush=True)

    def say(self, text: str) -> None:
        """Prints a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(text)
        elif not self._silent:
            print(text, flush=True)

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
