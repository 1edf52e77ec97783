"""SIGTERM and SIGINT: a run saves its state before it ends."""

import os
import signal


class Stopped(Exception):
    """SIGTERM or SIGINT asked the run to stop; the state is saved and the same command goes on from there."""

    def __init__(self, signum: int, step: int | None = None):
        self.signum, self.step = signum, step
        where = "before the first step" if step is None else f"at step {step}"
        super().__init__(f"stopped by {signal.Signals(signum).name} {where}: run the same command to go on")


class StopSignal:
    """Notes SIGTERM and SIGINT; the loop asks between steps and between the batches of an evaluation."""

    def __init__(self):
        self._signum = None
        signals = [s for s in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(s) is not signal.SIG_IGN]
        self._handlers = {s: signal.signal(s, self._note) for s in signals}

    def _note(self, signum, frame):
        del frame
        if self._signum is not None:  # a second one ends it now
            self.restore()
            signal.raise_signal(signum)
        self._signum = signum
        name = signal.Signals(signum).name
        os.write(2, f"{name}: saving at the next step; once more ends it at once\n".encode())

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._signum is not None

    def check(self) -> None:
        """Raises Stopped once a signal has come."""
        if self.requested:
            raise Stopped(self._signum)

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
