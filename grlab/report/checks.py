"""Whether the runs of a table may be compared: the differences between them that no row declares."""

from collections.abc import Sequence

from grlab.config import UNCOMPARED, differences
from grlab.experiment import Experiment
from grlab.report.records import Record

# What may differ from run to run without a word.
_PROVENANCE_FREE = ("command", "run_id", "resumed")
_CONFIG_FREE = ("seed", *UNCOMPARED)


def flags(experiment: Experiment, records: Sequence[Record]) -> dict[str, list[str]]:
    """For each row that has any: its differences in provenance and config from the baseline's first run.

    The config may differ in the fields that the row declares, and in those not between the seeds of one row.
    """
    if not records:
        return {}
    reference = next((r for r in records if r.row == experiment.baseline), records[0])
    found = {}
    for row in experiment.rows:
        runs = [r for r in records if r.row == row.name]
        said = {}  # text -> seeds
        for run in runs:
            for field, pair in differences(run.provenance, reference.provenance, _PROVENANCE_FREE).items():
                said.setdefault(_say(field, pair, reference), []).append(run.seed)
            for text in _resumptions(run):
                said.setdefault(text, []).append(run.seed)
            for field, pair in differences(run.config, reference.config, _CONFIG_FREE).items():
                if not experiment.may_differ(row, field):
                    said.setdefault(_say(field, pair, reference), []).append(run.seed)
            for field, pair in differences(run.config, runs[0].config, _CONFIG_FREE).items():
                if experiment.may_differ(row, field):
                    said.setdefault(_say(field, pair, runs[0]), []).append(run.seed)
        if said:
            found[row.name] = [f"{_seeds(seeds, len(runs))}{text}" for text, seeds in said.items()]
    return found


def unclean(records: Sequence[Record]) -> list[str]:
    """The names of the runs whose code is in no commit."""
    return [r.name for r in records if r.provenance.get("git_diff") or not r.provenance.get("git_commit")]


def origin(record: Record) -> str:
    """Where a run was made, for a heading: device x count, jax version, commit; "?" for what the run does not say."""
    p = record.provenance
    device = f"{p.get('device_kind', '?')} x {p.get('device_count', '?')}"
    return f"{device}, jax {p.get('versions', {}).get('jax', '?')}, commit {p.get('git_commit', '')[:10] or '?'}"


def _resumptions(run: Record) -> list[str]:
    """The resumptions that went on with something else than the run began with."""
    said = []
    for part in run.provenance.get("resumed", ()):
        changed = [field for field in part if field not in ("step", *_PROVENANCE_FREE)]
        if changed:
            said.append(f"resumed at step {part['step']} with another {', '.join(changed)}")
    return said


def _seeds(seeds: list[int], n: int) -> str:
    if len(seeds) == n:
        return ""
    return f"seed {seeds[0]}: " if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}: "


def _say(field: str, pair: tuple[object, object], reference: Record) -> str:
    ours, theirs = (("absent" if v is None else str(v)[:24]) for v in pair)
    return f"{field} is {ours}; {reference.name} has {theirs}"
