"""What each row of an experiment costs at a scale on a TPU topology: compiled for it, without the hardware."""

import dataclasses
import json
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from ml_collections import ConfigDict

from grlab import sweep
from grlab.cost import Cost, Topology, cost, topology
from grlab.errors import check_directory
from grlab.experiment import Experiment
from grlab.report.render import Block
from grlab.report.table import NONE
from grlab.train.rundir import code_state

GIB = 2**30
NOTES = (
    "The connection's own parameters and operations are those beyond the same model with the pre-norm residual. "
    "Operations are of training, without what remat computes again.",
    "Memory is what a chip holds at once in the compiled step: state, batch, temporaries and the program. Where the "
    "compiler refuses the step it is what it says is too much: all of it, or the temporaries alone.",
    "Moved and sent are of the compiled step with its loops counted as often as they run: bytes that a chip reads and "
    "writes in HBM, without the tiles' padding, and bytes that it sends to others, as few as a collective can.",
    "compute, HBM and wires are the least times of a step: all operations at the chip's bfloat16 peak, all bytes at "
    "its bandwidths, over all links at once. A step takes at least the longest of them, so that tokens a second are at "
    "most, and chip-hours at least, what stands here. No hardware has run it.",
)


def run(
    experiment: Experiment, scale: str, topology_name: str, rows: str, out: str | None, overrides: Sequence[str]
) -> None:
    """Prints the table of the plan; with `out` also writes it there, and its figures as JSON.

    `rows` names some of the experiment's rows, with commas between; empty: all.
    Raises UsageError for a topology, a row, a field or a combination of them that cannot be.
    """
    on = topology(topology_name)
    if out:
        check_directory("--out", out)  # before the minutes that the rows take
    chosen = experiment.some(rows)
    configs = {r.row.name: ConfigDict(r.config) for r in sweep.plan(experiment, scale, (0,), "runs", overrides)}
    costs = {}
    for k, row in enumerate(chosen, 1):
        start = time.monotonic()
        print(f"{row.name} ({k} of {len(chosen)}): compiling for {on.name}", file=sys.stderr, flush=True)
        c = costs[row.name] = cost(configs[row.name], on)
        print(f"{row.name}: {_outcome(c)}; {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    title = f"{experiment.title}: scale {scale} on {on.name}"
    head, blocks = _heading(c, on), tables(experiment, costs, on)
    if out:
        folder, name = Path(out), f"plan-{scale}-{on.name.replace(':', '-')}"
        folder.mkdir(parents=True, exist_ok=True)
        notes = "\n".join(f"- {note}" for note in NOTES)
        text = "\n\n".join([f"## {title}", head, *(block.markdown() for block in blocks), notes])
        (folder / f"{name}.md").write_text(text + "\n")
        record = _record(experiment, scale, costs, on, overrides)
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    notes = "\n".join(textwrap.fill(note, 120, initial_indent="- ", subsequent_indent="  ") for note in NOTES)
    print("\n\n".join([f"{title}\n{head}", *(block.terminal(120) for block in blocks), notes]))
    if out:
        print(f"\nwrote {name}.md and {name}.json to {out}")


def tables(experiment: Experiment, costs: Mapping[str, Cost], on: Topology) -> list[Block]:
    """Size, memory, times and traffic, a line a row; a row that does not fit says so and has no times."""
    kinds = list(dict.fromkeys(kind for c in costs.values() if c.fits for kind in c.moved.counts))

    def block(title: str, header: list[str], cells, all_rows: bool = False) -> Block:
        lines = []
        for name, c in costs.items():
            mark = "" if c.fits else " [DOES NOT FIT]"
            lines.append(
                [experiment.row(name).label + mark, *(cells(c) if c.fits or all_rows else [NONE] * len(header))]
            )
        return Block(title, ["row", *header], lines)

    capacity = f"{on.chip.hbm_bytes / GIB:.0f} GiB"
    size = block(
        "Size and memory",
        ["parameters", "for a token", "connection", "GFLOP/token", "connection", "GiB a chip", f"fits {capacity}"],
        lambda c: [
            *(f"{n:,}" for n in (c.params, c.active_params, c.connection_params)),
            *(f"{n / 1e9:,.4g}" for n in (c.flops_per_token, c.connection_flops_per_token)),
            *(f"{c.hbm_bytes / GIB:.2f}", "yes" if c.fits else "NO"),
        ],
        all_rows=True,
    )
    times = block(
        "A step at least",
        ["compute, ms", "HBM, ms", "wires, ms", "bound by", "tokens/s, at most", "chip-hours, at least"],
        lambda c: [
            *(f"{1e3 * s:,.1f}" for s in (c.compute_s, c.hbm_s, c.ici_s)),
            *(c.bound, f"{c.tokens_per_s:,.0f}", f"{c.chip_hours:,.0f}"),
        ],
    )
    traffic = block(
        "Moved in HBM and sent, GB a chip and step (how many collectives)",
        ["moved", "sent", *kinds],
        lambda c: [
            *(f"{b / 1e9:,.3f}" for b in (c.moved.hbm_bytes, sum(c.moved.sent_bytes.values()))),
            *(f"{c.moved.sent_bytes.get(kind, 0) / 1e9:,.3f} ({c.moved.counts.get(kind, 0)})" for kind in kinds),
        ],
    )
    return [size, times, traffic]


def _heading(c: Cost, on: Topology) -> str:
    mesh = " × ".join(f"{axis} {size}" for axis, size in c.mesh.items() if size > 1)
    steps = c.tokens // c.tokens_per_step
    return f"{len(on.devices)} chips, mesh {mesh or 'of one'}; {steps:,} steps of {c.tokens_per_step:,} tokens"


def _outcome(c: Cost) -> str:
    if not c.fits:
        return f"DOES NOT FIT, {c.hbm_bytes / GIB:.2f} GiB a chip"
    return f"{c.hbm_bytes / GIB:.2f} GiB a chip, at least {1e3 * c.step_s:.1f} ms a step ({c.bound})"


def _record(experiment: Experiment, scale: str, costs: Mapping[str, Cost], on: Topology, overrides) -> dict:
    code = code_state()
    return {
        "experiment": experiment.name,
        "scale": scale,
        "overrides": list(overrides),
        "topology": on.name,
        "chips": len(on.devices),
        "chip": on.chip._asdict(),
        **(code | {"versions": code["versions"] | {"libtpu": metadata.version("libtpu")}}),
        "rows": {name: dataclasses.asdict(c) | {"step_s": c.step_s, "bound": c.bound} for name, c in costs.items()},
    }
