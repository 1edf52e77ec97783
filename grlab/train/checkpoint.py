"""Checkpoints: the one module that knows Orbax."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from grlab.errors import RunFailed, UsageError, first_line


class Checkpoints:
    """The checkpoints of one run directory: written in the background, the last `keep` kept.

    A checkpoint is the training state and the position of the data. It is renamed into place once it is whole, so one
    cut short by a kill is never found. A save that failed raises RunFailed at the next `check`, save or `close`.
    """

    def __init__(self, directory: Path, keep: int):
        self._directory = directory.resolve()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=True, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options, item_names=("state", "data"))
        self._saving: int | None = None  # the step of a save whose end nobody has seen

    def latest(self) -> int | None:
        """The step of the newest checkpoint, one that is being written included."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The steps of all checkpoints."""
        return list(self._manager.all_steps())

    def forget_after(self, step: int) -> None:
        """Deletes the checkpoints after `step`, which will be made again."""
        for later in self.steps():
            if later > step:
                self._manager.delete(later)

    def last_to(self, step: int) -> int | None:
        """The newest checkpoint of `step` or before it, one that is being written included."""
        return max((s for s in self.steps() if s <= step), default=None)

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict]:
        """The state (with the shardings of `abstract_state`) and the data position that were saved at `step`.

        Raises UsageError when the checkpoint cannot be read.
        """
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state), data=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=args)
        except Exception as e:  # Orbax raises whatever its storage layer does
            remedy = f"cannot be read ({first_line(e)}): delete that folder to resume from the one before it"
            raise UsageError("checkpoint", str(self._directory / str(step)), remedy) from e
        return restored.state, restored.data

    def save(self, step: int, state: Any, data: dict) -> None:
        """Starts writing `state` and the data position; returns once the state is copied."""
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data))
        self.check(wait=True)
        self._saving = step
        self._surface(lambda: self._manager.save(step, args=args, force=True))

    def check(self, wait: bool = False) -> None:
        """Raises RunFailed if the save under way has failed; it does not wait for its end unless it is told to."""
        if self._saving is not None and (wait or not self._manager.is_saving_in_progress()):
            self._surface(self._manager.wait_until_finished)
            self._saving = None

    def close(self) -> None:
        """Waits for the save that is under way."""
        self.check(wait=True)
        self._manager.close()

    def _surface(self, call) -> None:
        try:
            call()
        except Exception as e:
            raise RunFailed(f"checkpoint of step {self._saving} could not be saved: {first_line(e)}") from e
