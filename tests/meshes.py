"""The losses of a row on meshes of eight devices and on one device: `python -m tests.meshes ROW KIND`, as JSON.

In a process of its own, as the number of devices is fixed before JAX starts.
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax

from grlab import parallel
from grlab.train.step import make_trainer
from tests import rows

STEPS = 10
ALONE = {"data": 1, "fsdp": 1, "tensor": 1, "expert": 1}
DENSE = ({"data": 8}, {"data": 4, "fsdp": 2}, {"data": 2, "fsdp": 2, "tensor": 2})
HYBRID = ({"data": 2, "fsdp": 2, "expert": 2},)


def losses(config, mesh) -> list[float]:
    """Of the first steps on batches of eight rows."""
    trainer = make_trainer(config, 256, mesh)
    state, found = trainer.init(), []
    for step in range(STEPS):
        window_BxT1 = rows.tokens(8, config.seq_len + 1, seed=step)
        batch = {"tokens_BxT": window_BxT1[:, :-1], "targets_BxT": window_BxT1[:, 1:]}
        state, metrics = trainer.step(state, parallel.put_batch(batch, mesh))
        found.append(float(metrics["loss"]))
    return found


def main(row: str, kind: str) -> None:
    """Prints {mesh: losses} of the row around dense layers, or around every kind of layer."""
    more, meshes = {"dense": ((), DENSE), "hybrid": (rows.HYBRID_MILD, HYBRID)}[kind]
    config = rows.tiny(row, "steps=10", "optim.warmup=2", *more)
    found = {"one": losses(config, parallel.make_mesh(ALONE, jax.devices()[:1]))}
    for sizes in meshes:
        found[str(sizes)] = losses(config, parallel.make_mesh(ALONE | sizes))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
