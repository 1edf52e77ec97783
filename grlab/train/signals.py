"""SIGTERM and SIGINT: a run saves its state before it ends."""

import os
import signal

from grlab import distributed


class Stopped(Exception):
    """SIGTERM or SIGINT asked the run to stop; the state is saved and the same command goes on from there."""

    def __init__(self, signum: int, where: str):
        self.signum = signum
        super().__init__(f"stopped by {signal.Signals(signum).name} {where}: run the same command to go on")


class StopSignal:
    """Notes SIGTERM and SIGINT; the loop asks between steps and between the batches of an evaluation."""

    def __init__(self):
        self.during = "start"  # what the run is doing, for what is said to whoever stops it
        self.came_during: str | None = None
        self._signum = None
        self._followed = False  # the signal came to another process of the run
        signals = [s for s in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(s) is not signal.SIG_IGN]
        self._handlers = {s: signal.signal(s, self._note) for s in signals}

    def _note(self, signum, frame):
        del frame
        if self._signum is not None and not self._followed:  # a second one ends it now
            self.restore()
            signal.raise_signal(signum)
        self._followed = False  # what signals all processes of a run may come to this one after their word of it
        self._signum, self.came_during = signum, self.during
        name = signal.Signals(signum).name
        text = f"{name} during {self.during}: saves and stops as soon as that can be left; once more ends it at once"
        os.write(2, f"{text}\n".encode())

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._signum is not None

    def check(self) -> None:
        """Raises Stopped once a signal has come, to any process of the run: all of them must ask."""
        if distributed.anyone(self.requested):
            self.follow()
            raise Stopped(self._signum, f"during {self.came_during}")

    def follow(self) -> None:
        """Takes it that a signal has come: it has, to this process or another one."""
        if not self.requested:
            self._signum, self.came_during, self._followed = signal.SIGTERM, self.during, True

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
