"""A Slurm cluster of four nodes on this machine, with its own daemons, key, ports and files."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

import psutil

from tests.worker_pool import free_port

NODES = 4
_NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
BUSYBOX = Path("/bin/busybox")
_START_S, _STOP_S = 30, 20


def why_no_containers() -> str | None:
    """Return the reason why Slurm cannot run containers on this machine, or None if it can."""
    if (reason := why_not()) is not None:
        return reason
    if shutil.which("runc", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        return "no runc: `.ci/run` installs it where root may"
    return None if BUSYBOX.exists() else f"no {BUSYBOX}: `.ci/run` installs busybox-static"


def why_not() -> str | None:
    """Return the reason why Slurm cannot run on this machine, or None if it can."""
    missing = [
        name
        for name in _NEEDED
        if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    if missing:
        return f"no {', '.join(missing)}: `.ci/run` installs Slurm where root may"
    return None if os.geteuid() == 0 else "slurmd needs root to start the steps of jobs"


class SlurmCluster:
    """Nodes n1 to n4 in the partition `main`, each with 8 CPUs and 8 files that stand for GPUs.

    Jobs of the partition `urgent` preempt jobs of `main`, whose steps get SIGTERM one minute
    before.

    Commands use the cluster through the variables in `environment`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.environment = {
            **os.environ,
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
            "SLURM_CONF": str(directory / "slurm.conf"),
        }

    def __enter__(self) -> SlurmCluster:
        (self._directory / "state").mkdir(parents=True)
        # munged requires that all users can reach its socket.
        for above in (self._directory, *self._directory.parents):
            if above.stat().st_uid == 0 and above != Path("/"):
                above.chmod(above.stat().st_mode | 0o111)
        self._write_configuration()
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def command(self, *words: str) -> str:
        """Run one of Slurm's commands and return its output."""
        ended = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert ended.returncode == 0, f"{words}: {ended.stderr}"
        return ended.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """Return Slurm's fields of a job, or of the first component of a heterogeneous job."""
        line = self.command("scontrol", "show", "job", "--oneliner", job).splitlines()[0]
        return dict(field.partition("=")[::2] for field in line.split())

    def start_soon(self, job: str) -> None:
        """Make the scheduler consider a requeued job now instead of within a few minutes."""
        while self.state(job)["JobState"] == "PENDING":
            self.command("scontrol", "update", f"JobId={job}", "Comment=look")
            time.sleep(1)

    def steps(self, job: str) -> dict[str, str]:
        """Return the numbers of the running steps of all components by name."""
        jobs = self.command("squeue", "--noheader", f"--jobs={job}", "--format=%A")
        listed = self.command(
            "squeue", "--noheader", "--steps", f"--jobs={','.join(jobs.split())}", "--format=%i %j"
        )
        return {
            name: number
            for number, name in (line.split(maxsplit=1) for line in listed.splitlines())
        }

    def log(self, daemon: str) -> str:
        """Return the log of a daemon."""
        return (self._directory / f"{daemon}.log").read_text(errors="replace")

    def _start(self) -> None:
        directory = self._directory
        key = directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        flags = [f"--{flag}={directory}/munged.{suffix}" for flag, suffix in files.items()]
        self.command("munged", f"--key-file={key}", "--force", *flags)
        self.command("slurmctld")
        for node in range(1, NODES + 1):
            self.command("slurmd", "-N", f"n{node}")
        deadline = time.monotonic() + _START_S
        while self.command("sinfo", "--noheader", "--format=%t %D") != f"idle {NODES}":
            assert time.monotonic() < deadline, (
                f"the nodes are not idle: {self.log('slurmctld')[-2000:]}"
            )
            time.sleep(0.2)

    def _stop(self) -> None:
        """Stop all jobs, then the daemons, by process id."""
        subprocess.run(
            ["scancel", "--user=root"],
            env=self.environment,
            capture_output=True,
            check=False,
            timeout=60,
        )
        ours = [process for process in psutil.process_iter() if _is_of(process, self._directory)]
        deadline = time.monotonic() + _STOP_S
        while time.monotonic() < deadline and any(
            process.is_running() and _name(process) == "slurmstepd" for process in ours
        ):
            time.sleep(0.2)
        for process in (
            process for process in psutil.process_iter() if _is_of(process, self._directory)
        ):
            process.send_signal(signal.SIGKILL)

    def _write_configuration(self) -> None:
        directory, host = self._directory, socket.gethostname().partition(".")[0]
        control, *nodes = (free_port() for _ in range(NODES + 1))
        lines = [
            "ClusterName=aligner",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={control}",
            *(
                f"Slurm{daemon}PidFile={directory}/slurm{daemon}{node}.pid"
                for daemon, node in (("ctld", ""), ("d", "-%n"))
            ),
            *(
                f"Slurm{daemon}LogFile={directory}/slurm{daemon}{node}.log"
                for daemon, node in (("ctld", ""), ("d", "-%n"))
            ),
            f"SlurmdSpoolDir={directory}/spool-%n",
            f"StateSaveLocation={directory}/state",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            # the delay of a requeued job
            f"AuthInfo=socket={directory}/munged.sock,cred_expire=15",
            "CredType=cred/munge",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=bf_interval=1,bf_resolution=1,sched_interval=1,batch_sched_delay=0,bf_hetjob_immediate",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SlurmdParameters=config_overrides",  # nodes with more CPUs than this machine has
            "MpiDefault=none",
            "GresTypes=gpu",
            "EnforcePartLimits=ALL",
            # the default; a supervisor takes about five seconds to stop its ranks
            "KillWait=30",
            "ReturnToService=2",
            *(
                f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8"
                " Gres=gpu:8 State=UNKNOWN"
                for number, port in enumerate(nodes, 1)
            ),
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            (
                f"PartitionName=main Nodes=n[1-{NODES}] Default=YES MaxTime=60 State=UP"
                " PriorityTier=1 GraceTime=60"
            ),
            f"PartitionName=urgent Nodes=n[1-{NODES}] MaxTime=60 State=UP PriorityTier=2",
        ]
        (directory / "slurm.conf").write_text("\n".join(lines) + "\n")
        # The commands that Slurm's documentation recommends for runc. Slurm passes the numbers of
        # the node, job, step and task, which distinguish containers.
        runc = f"runc --rootless=true --root={directory}/runc"
        container = "%n.%u.%j.%s.%t"
        (directory / "oci.conf").write_text(
            f'RunTimeQuery="{runc} state {container}"\n'
            f'RunTimeKill="{runc} kill -a {container}"\n'
            f'RunTimeDelete="{runc} delete --force {container}"\n'
            f'RunTimeRun="{runc} run {container} -b %b"\n'
        )
        for number in range(8):
            (directory / f"gpu{number}").symlink_to("/dev/null")
        (directory / "gres.conf").write_text(f"Name=gpu File={directory}/gpu[0-7]\n")


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def _is_of(process: psutil.Process, directory: Path) -> bool:
    """Whether a process is a daemon, a step or a child of a step of the cluster in a directory."""
    try:
        is_configured = process.environ().get("SLURM_CONF") == str(directory / "slurm.conf")
        return process.pid != os.getpid() and (
            is_configured or str(directory) in " ".join(process.cmdline())
        )
    except psutil.Error:
        return False
