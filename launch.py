"""The one door: train a run, sweep an experiment, print its table, plan its cost, look into a model, time it.

    python launch.py train --config=configs/gr.py:cpu --workdir=runs/gr-0 --config.optim.lr=3e-3
    python launch.py sweep --experiment=experiments/table5.py --scale=cpu --seeds=3 --runs=runs/table5
    python launch.py sweep --on=slurm --slurm.partition=gpu --slurm.gpus_per_node=8 --experiment=...
    python launch.py table --experiment=experiments/table5.py --runs=runs/table5 --out=experiments/results/table5_cpu
    python launch.py plan --experiment=experiments/table5.py --scale=25b_a3b --topology=v5p:8x8x4
    python launch.py analyze --hf=DIR
    python launch.py bench --peers

Exit status: 0 done; 1 a run failed or diverged, or a sweep was stopped; 2 the command was wrong; 128 + n a run was
stopped by signal n, its state saved.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import sys

from grlab import config as configs
from grlab import launchers
from grlab.chips import COMPILER_ENV
from grlab.errors import RunFailed, UsageError, unknown

# A machine without a TPU is told so by libtpu at every import: noise for whoever has none.
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def train(args, rest: list[str]) -> int:
    """Trains one run, or resumes it."""
    config = configs.load(args.config, _overrides(rest))
    from grlab import compiled, distributed  # JAX starts here, after the command is known to be right
    from grlab.train import loop, signals

    compiled.keep()
    distributed.start(args.coordinator, args.processes, args.process_id, args.wait)
    try:
        (loop.train_together if config.seeds else loop.train)(config, args.workdir)
    except signals.Stopped as e:
        print(e, file=sys.stderr)
        return 128 + e.signum
    return 0


def sweep(args, rest: list[str]) -> int:
    """Runs the rows x seeds of an experiment that are missing, then prints its table."""
    if args.on == "pod":  # which compiles for TPUs, as plan does
        os.environ |= COMPILER_ENV
    from grlab import experiment, sweep

    ours = tuple(f"--{group}." for group in launchers.GROUPS)
    options = [argument.removeprefix("--") for argument in rest if argument.startswith(ours)]
    options += ["pod.print=true"] if args.print else []
    launcher = launchers.get(args.on, options)
    with _reader_may_leave() if args.dry_run else contextlib.nullcontext():
        return sweep.run_sweep(
            experiment.load(args.experiment),
            args.scale,
            configs.parse_seeds("--seeds", args.seeds),
            args.runs,
            functools.partial(launcher, width=args.jobs),
            dry_run=args.dry_run,
            extra_overrides=_overrides([argument for argument in rest if not argument.startswith(ours)]),
        )
    return 0


def table(args, rest: list[str]) -> int:
    """Prints the table of an experiment's runs; with --out also writes it, its figure and its records."""
    _no_more(rest)
    from grlab import experiment, report

    chosen = experiment.load(args.experiment)
    if args.baseline:
        chosen = dataclasses.replace(chosen, baseline=args.baseline)
    with _reader_may_leave():
        report.write(chosen, args.runs, args.out)
    return 0


def plan(args, rest: list[str]) -> int:
    """Prints what each row would cost on a TPU topology; compiles for it, and needs no TPU."""
    overrides = _overrides(rest)
    os.environ |= COMPILER_ENV  # before JAX is imported
    from grlab import experiment
    from grlab import plan as plans

    with _reader_may_leave():
        plans.run(experiment.load(args.experiment), args.scale, args.topology, args.rows, args.out, overrides)
    return 0


def analyze(args, rest: list[str]) -> int:
    """Prints the weights of a public checkpoint's residual connections by depth; reads no other tensor of it."""
    _no_more(rest)
    from grlab.analysis import gates

    with _reader_may_leave():
        print(gates.of_checkpoint(args.hf))
    return 0


def bench(args, rest: list[str]) -> int:
    """Times training steps, compiling, sites and the input pipeline side by side, and counts operations' bytes."""
    overrides = _overrides(rest)
    if args.cores and hasattr(os, "sched_setaffinity"):  # before JAX makes its threads
        cores = sorted(os.sched_getaffinity(0))
        if not 0 < args.cores <= len(cores):
            raise UsageError("--cores", args.cores, f"must lie in 1 .. {len(cores)}, or be 0 for all")
        os.sched_setaffinity(0, cores[-args.cores :])
    from grlab import bench, experiment

    with _reader_may_leave():
        bench.run(
            experiment.load(args.experiment),
            args.scale,
            parts=args.parts,
            rows=args.rows,
            rounds=args.rounds,
            peers=args.peers,
            out=args.out,
            overrides=overrides,
        )
    return 0


@contextlib.contextmanager
def _reader_may_leave():
    """Around a command that only prints: `| head` may close the pipe, and nothing is lost by it."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


COMMANDS = {
    "train": (train, "--config=configs/gr.py:demo --workdir=runs/gr-0 --config.optim.lr=3e-3"),
    "sweep": (sweep, "--experiment=experiments/table5.py --scale=cpu --seeds=3 --runs=runs/table5"),
    "table": (table, "--experiment=experiments/table5.py --runs=runs/table5 --out=out"),
    "plan": (plan, "--experiment=experiments/table5.py --scale=25b_a3b --topology=v5p:8x8x4"),
    "analyze": (analyze, "--hf=DIR"),
    "bench": (bench, "--parts=sites --peers"),
}


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="launch.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="|".join(COMMANDS), required=True, parser_class=_Parser)
    for name, (function, example) in COMMANDS.items():
        command = commands.add_parser(
            name, allow_abbrev=False, description=function.__doc__, epilog=f"example: python launch.py {name} {example}"
        )
        command.set_defaults(run=function)
        if name == "train":
            command.add_argument("--config", required=True, metavar="FILE[:SCALE]", help="a row and its scale")
            command.add_argument("--workdir", required=True, metavar="DIR", help="the run directory; resumed if there")
            several = command.add_argument_group("processes that JAX does not know to be of one run")
            several.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 is")
            several.add_argument("--processes", type=int, metavar="N", help="how many; 1: this one alone")
            several.add_argument("--process_id", type=int, metavar="I", help="this one's number, from 0 on")
            several.add_argument("--wait", type=int, default=300, metavar="SECONDS", help="for the others; default 300")
        elif name == "analyze":
            command.add_argument("--hf", required=True, metavar="DIR", help="the folder of a qwen4_exp or deepseek_v4")
        elif name == "bench":
            command.add_argument(
                "--experiment",
                default="experiments/systems.py",
                metavar="FILE",
                help="its rows; default experiments/systems.py",
            )
            command.add_argument("--scale", default="cpu", help="a scale of configs/scales.py; default cpu")
            parts = "of steps, compile, sites, operations, inputs; default steps,sites,inputs"
            command.add_argument("--parts", default="steps,sites,inputs", metavar="PART,PART", help=parts)
            command.add_argument("--rounds", type=int, default=9, help="that medians are taken of; default 9")
            command.add_argument("--peers", action="store_true", help="sites of public code beside ours, if installed")
            command.add_argument("--cores", type=int, default=1, help="of a CPU; default 1; 0: all")
        else:
            command.add_argument("--experiment", required=True, metavar="FILE", help="the rows and published figures")
        if name in ("sweep", "table"):
            command.add_argument("--runs", required=True, metavar="DIR", help="where the run directories are")
        if name in ("sweep", "plan"):
            command.add_argument("--scale", required=True, help="a scale of configs/scales.py")
        if name == "plan":
            command.add_argument("--topology", required=True, metavar="CHIP:AxB", help="such as v5e:4x4 or v5p:8x8x4")
        if name in ("plan", "bench"):
            command.add_argument("--rows", default="", metavar="ROW,ROW", help="these rows; default all")
            command.add_argument("--out", metavar="DIR", help="write the table and its figures here")
        if name == "sweep":
            command.add_argument("--seeds", default="3", help="how many (3), or which (0,1,5 or 7,); default 3")
            command.add_argument("--jobs", type=int, default=1, help="runs at a time, each on its own cores; default 1")
            command.add_argument("--on", default="local", help="the launcher: local, slurm or pod; default local")
            command.add_argument("--dry_run", action="store_true", help="print the commands and run nothing")
            command.add_argument(
                "--print", action="store_true", help="with --on=pod: print the runs as gcloud commands"
            )
            of_launcher = command.add_argument_group("options of a launcher")
            for option, example in (("slurm", "--slurm.partition=gpu"), ("pod", "--pod.accelerators=tpu-v5p-16")):
                of_launcher.add_argument(f"--{option}.FIELD", dest="_", metavar="VALUE", help=f"such as {example}")
        if name == "table":
            command.add_argument("--out", metavar="DIR", help="write the table, figure and records here")
            command.add_argument("--baseline", metavar="ROW", help="compare with this row, not the experiment's own")
        if name in ("train", "sweep", "plan", "bench"):
            command.add_argument_group("fields").add_argument(
                "--config.FIELD", dest="_", metavar="VALUE", help="override a field, such as --config.steps=100"
            )
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line, with the nearest name where an argument is misspelt."""

    def error(self, message: str):
        if message.startswith("argument launch.py") or "invalid choice" in message:
            value = message.split("invalid choice: ")[-1].split(" ")[0].strip("'")
            raise unknown("command", value, COMMANDS)
        raise UsageError("command", " ".join(sys.argv[1:2]), f"{message} (see python {self.prog} --help)")


def _overrides(rest: list[str]) -> list[str]:
    """The `--config.field=value` arguments, without their prefix."""
    _no_more([argument for argument in rest if not argument.startswith("--config.")])
    return [argument.removeprefix("--config.") for argument in rest]


def _no_more(rest: list[str]) -> None:
    if rest and not rest[0].startswith("-"):
        raise UsageError("argument", rest[0], "what is it the value of? Options are given as --NAME=VALUE")
    if rest:
        known = "config workdir coordinator processes process_id wait".split()
        known += "experiment scale seeds jobs runs on dry_run print out baseline hf topology rows".split()
        known += "parts rounds peers cores".split()
        known += [f"{group}.FIELD" for group in launchers.GROUPS]
        raise unknown("argument", rest[0].partition("=")[0], [f"--{name}" for name in known])


def main(argv: list[str]) -> int:
    """Runs one command -> the exit status."""
    try:
        args, rest = _parser().parse_known_args(argv)
        return args.run(args, rest)
    except UsageError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except RunFailed as e:
        print(f"failed: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    exit_status = main(sys.argv[1:])
    if exit_status in (1, 2):
        # A checkpoint that failed leaves threads of Orbax that wait for minutes, and at its end a process waits for the
        # others of its run. All else has been closed by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_status)
    sys.exit(exit_status)
