"""Writes one SkyPilot task file a run, to be launched as a managed job; or prints the runs as gcloud commands.

Nothing is launched from here: a pod costs money from its start, and has its own commands for it. A row that does not
fit on it is refused: its training step is compiled for the pod's topology first.
"""

import importlib.util
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from ml_collections import ConfigDict

from grlab.errors import UsageError, first_line, one_of
from grlab.launchers import Job

RESOURCES = {"accelerators": str, "cloud": str, "region": str, "zone": str, "use_spot": bool, "instance_type": str}
RESOURCES |= {"cpus": str, "memory": str, "disk_size": int, "image_id": str}
TASK = {"bucket": str, **RESOURCES, "runtime_version": str, "topology": str}  # the options of a task file
GCLOUD = {"name": str, "zone": str, "project": str, "topology": str}  # those of --print
EXAMPLES = {"name": "my-pod", "zone": "us-east5-a", "accelerators": "tpu-v5p-16", "bucket": "gs://my-runs"}
EXAMPLES |= {"topology": "v5p:2x2x2 (none: whether the rows fit is not looked at)"}
RUNS = "/grlab-runs"  # where a pod has the bucket
PYTHON = "~/grlab-env/bin/python"
_WORDS = {"true": True, "false": False}


def launch(jobs: Sequence[Job], cwd: Path, width: int = 1, options: Mapping[str, str] | None = None) -> list[None]:
    """Writes .pod/RUN.yaml beside the run directories and prints the commands that launch them.

    With the option `print` it prints the gcloud commands that run `jobs` in turn on one pod, and writes nothing.
    Raises UsageError for an option that cannot be, and for a job that does not fit on the option `topology`.
    """
    if width != 1:
        raise UsageError("--jobs", width, "a pod has one run at a time, and SkyPilot starts what it is told to")
    options = dict(options or {})
    as_gcloud = options.pop("print", "false") == "true"
    fields = _fields(options, GCLOUD if as_gcloud else TASK)
    needed = ["name", "zone"] if as_gcloud else ["accelerators", "bucket"]
    if fields.get("accelerators", "tpu").startswith("tpu"):
        needed.append("topology")
    for field in needed:
        if field not in fields:
            raise UsageError("on", "pod", f"needs --pod.{field}, such as --pod.{field}={EXAMPLES[field]}")
    _check_fit(jobs, fields.pop("topology", "none"), fields.get("accelerators", ""))
    if as_gcloud:
        for job in jobs:
            print(gcloud(job, **fields))
    else:
        for job in jobs:
            _check_paths(job.config["data"], cwd)
        _write(jobs, cwd, fields)
    return [None] * len(jobs)


def _fields(options: Mapping[str, str], types: Mapping[str, type]) -> dict[str, object]:
    fields = {}
    for name, text in options.items():
        one_of("pod", name, types)
        try:
            fields[name] = _WORDS[text] if types[name] is bool else types[name](text)
        except (KeyError, ValueError):
            raise UsageError(f"pod.{name}", text, f"must be of type {types[name].__name__}") from None
    if "://" not in fields.get("bucket", "://"):
        raise UsageError("pod.bucket", fields["bucket"], "must be the address of a bucket, such as gs://my-runs")
    return fields


def _check_fit(jobs: Sequence[Job], topology: str, accelerators: str) -> None:
    """Raises UsageError for the jobs whose training step needs more memory than a chip of `topology` has."""
    if topology == "none":
        return
    from grlab.cost import cost  # starts JAX
    from grlab.cost import topology as topology_of

    on = topology_of(topology)
    name, a_chip = on.chip.slices
    here = f"tpu-{name}-{a_chip * len(on.devices)}"
    if accelerators not in ("", here):
        raise UsageError("pod.topology", topology, f"is {here}, and --pod.accelerators={accelerators}")
    costs = {}
    for job in jobs:
        row = job.config["row"]
        if row not in costs:  # its seeds cost the same
            print(f"{row}: compiling for {on.name}", file=sys.stderr, flush=True)
            costs[row] = cost(ConfigDict(job.config), on)
    too_large = [f"{row} ({c.hbm_bytes / 2**30:.1f} GiB)" for row, c in costs.items() if not c.fits]
    if too_large:
        has = f"a chip has {on.chip.hbm_bytes / 2**30:.0f} GiB"
        raise UsageError("pod.topology", topology, f"{has}, which is too little for {', '.join(too_large)}")


def _check_paths(data: Mapping[str, object], cwd: Path) -> None:
    """Raises UsageError for files of `config.data` that the repository, all that a pod is given, does not have."""
    for field in ("tokenizer", "path"):
        path = data[field]
        if path and "://" not in path and not (cwd / path).resolve().is_relative_to(cwd):
            remedy = "is not in the repository, which is all that a pod is given: copy it there"
            raise UsageError(f"config.data.{field}", path, remedy)


def gcloud(job: Job, name: str, zone: str, project: str = "") -> str:
    """The command that runs `job` on every host of the pod `name`, from the clone ~/grlab that each of them has."""
    command = f"cd ~/grlab && {_train(job.command)}"
    where = f"--zone={zone}" + (f" --project={project}" if project else "")
    return f"gcloud compute tpus tpu-vm ssh {name} {where} --worker=all --command={shlex.quote(command)}"


def task(job: Job, cwd: Path, fields: Mapping[str, object]) -> dict:
    """The SkyPilot task of `job`: its machine, the repository, the bucket its run directory is in, and its command."""
    sweep = job.workdir.parent.name
    resources = {name: value for name, value in fields.items() if name in RESOURCES}
    if "runtime_version" in fields:
        resources["accelerator_args"] = {"runtime_version": fields["runtime_version"]}
    command = [f"--workdir={RUNS}/{sweep}/{job.name}" if a.startswith("--workdir=") else a for a in job.command]
    return {
        "name": re.sub("[^A-Za-z0-9]", "-", f"{sweep}-{job.name}"),
        "workdir": str(cwd),
        "resources": resources,
        "file_mounts": {RUNS: {"source": fields["bucket"], "mode": "MOUNT"}},
        "setup": _setup(cwd, "tpu" if str(fields["accelerators"]).startswith("tpu") else "cuda12"),
        "run": f"{_train(command)}\n",
    }


def _train(command: Sequence[str]) -> str:
    """A job's command with the pod's Python for this machine's."""
    return f"{PYTHON} {shlex.join(command[1:])}"


def _setup(cwd: Path, extra: str) -> str:
    """Installs what a run needs. By uv: the images of TPU machines have a Python older than the one that grlab asks."""
    jax = re.search(r"^jax==\S+", (cwd / "requirements.txt").read_text(), re.MULTILINE).group()
    return (
        'export PATH="$HOME/.local/bin:$PATH"\n'
        "command -v uv || curl -LsSf https://astral.sh/uv/install.sh | sh\n"
        "uv venv --quiet --allow-existing --python 3.11 ~/grlab-env\n"
        f"uv pip install --quiet --python {PYTHON} -r requirements.txt '{jax.replace('jax', f'jax[{extra}]')}'\n"
    )


def _write(jobs: Sequence[Job], cwd: Path, fields: Mapping[str, object]) -> None:
    runs = jobs[0].workdir.parent
    folder = runs / ".pod"
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for job in jobs:
        files.append(folder / f"{job.name}.yaml")
        files[-1].write_text(yaml.dump(task(job, cwd, fields), Dumper=_Dumper, sort_keys=False, width=10_000))
    checked = _check(files[0])  # the others differ from it in names alone
    print(f"{len(files)} task files in {folder}, {checked}; launch them as managed jobs:")
    for file in files:
        print(f"  sky jobs launch --yes --detach-run {shlex.quote(str(file))}")
    if str(fields["bucket"]).startswith("gs://"):
        print("watch them with: sky jobs queue; bring the runs here for the table with:")
        print(f"  gcloud storage rsync --recursive {fields['bucket']}/{runs.name} {runs}")


def _check(file: Path) -> str:
    """Has SkyPilot read the file, where it is installed -> whether it has. Raises UsageError with SkyPilot's words."""
    if importlib.util.find_spec("sky") is None:
        return "not checked (no package skypilot here)"
    import sky

    try:
        sky.Task.from_yaml(str(file))
    except Exception as e:  # whatever its loader raises
        raise UsageError("on", "pod", f"SkyPilot refuses {file}: {first_line(e)}") from None
    return "read by SkyPilot"


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, as one would write it."""


def _text(dumper: yaml.SafeDumper, text: str):
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
