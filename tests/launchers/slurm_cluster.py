"""A real Slurm of one node, on this machine, in a temporary directory: munged, slurmctld and slurmd, run as root."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")

CONF = """
ClusterName=grlab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
MailProg=/bin/true
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no such cluster here; empty where there can."""
    absent = [name for name in PROGRAMS if _find(name) is None]
    if absent:
        packages = "apt install slurmctld slurmd slurm-client munge"
        return f"no {', '.join(absent)} on this machine ({packages})"
    return "" if os.geteuid() == 0 else "slurmctld and slurmd are started as root"


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextlib.contextmanager
def running(directory: Path, cores: int) -> Iterator[Path]:
    """A cluster of `cores` cores -> its slurm.conf, the value for $SLURM_CONF; all of it is stopped at the end."""
    for name in ("state", "spool"):
        (directory / name).mkdir()
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    conf = directory / "slurm.conf"
    ports = {"ctld_port": _free_port(), "slurmd_port": _free_port()}
    conf.write_text(CONF.format(dir=directory, host=socket.gethostname().split(".")[0], cores=cores, **ports))
    # slurmd asks for it whatever ProctrackType says.
    (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")

    env = os.environ | {"SLURM_CONF": str(conf)}
    munge = [f"--{name}={directory}/munge.{name}" for name in ("socket", "pid-file", "seed-file", "log-file")]
    munge += [f"--key-file={key}", "--force", "--foreground"]
    daemons: list[subprocess.Popen] = []

    def start(program: str, *arguments: str) -> None:
        with (directory / f"{program}.out").open("wb") as out:
            command = [_find(program), *arguments]
            daemons.append(subprocess.Popen(command, env=env, stdout=out, stderr=out, process_group=0))

    def ready(what: str, command: list[str], said: str = "") -> None:
        deadline = time.monotonic() + 30
        while True:
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode == 0 and said in done.stdout:
                return
            if time.monotonic() > deadline:
                logs = "\n".join(log.read_text()[-1500:] for log in sorted(directory.glob("*.log")))
                raise RuntimeError(f"{what} does not come up: {done.stdout}{done.stderr}\n{logs}")
            time.sleep(0.1)

    try:
        start("munged", *munge)
        ready("munged", ["test", "-S", str(directory / "munge.socket")])
        start("slurmctld", "-D", "-i")
        ready("slurmctld", ["scontrol", "ping"], "UP")
        start("slurmd", "-D")
        ready("slurmd", ["sinfo", "--noheader", "--format=%T"], "idle")
        yield conf
    finally:
        if len(daemons) > 1:
            subprocess.run(["scancel", "--full", "--signal=KILL", "--user=root"], env=env, check=False)
            subprocess.run(["scancel", "--user=root"], env=env, check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
