"""Trains a run and kills itself right after an update: `python -m tests.train.killed STEP SAVED CONFIG.json WORKDIR`.

SAVED is the checkpoint that must be whole before; 0: the kill comes as soon as the update is done.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from ml_collections import ConfigDict

from grlab.train import loop


def main(step: int, saved: int, config: dict, workdir: Path) -> None:
    record = loop.Run.record

    def record_and_die(self, at, metrics):
        record(self, at, metrics)
        if at == step:
            while saved and not (workdir / "checkpoints" / str(saved)).exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    loop.Run.record = record_and_die
    loop.train(ConfigDict(config), workdir)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()), Path(sys.argv[4]))
