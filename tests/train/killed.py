"""Trains a run and kills itself right after an update: `python -m tests.train.killed STEP CONFIG.json WORKDIR`."""

import json
import os
import signal
import sys
from pathlib import Path

from ml_collections import ConfigDict

from grlab.train import loop


def main(step: int, config: dict, workdir: str) -> None:
    record = loop.Run.record

    def record_and_die(self, at, metrics):
        record(self, at, metrics)
        if at == step:
            os.kill(os.getpid(), signal.SIGKILL)

    loop.Run.record = record_and_die
    loop.train(ConfigDict(config), workdir)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), sys.argv[3])
