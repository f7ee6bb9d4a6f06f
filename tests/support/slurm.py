"""A Slurm cluster on hosts (machines.py): its controller here, a node's daemon on each host."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
from pathlib import Path

import machines
from machines import TERMINATED, Machines, wait

_CONFIGURATION = """\
ClusterName=nbtest
SlurmctldHost={name}({net}.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SlurmdTimeout=10
KillWait=2
InactiveLimit=0
JobAcctGatherType=jobacct_gather/none
OverTimeLimit=0
{nodes}
PartitionName=main Nodes=host[1-{count}] Default=YES State=UP MaxTime=INFINITE
"""


def missing() -> str:
    """Why there can be no such cluster here; '' if there can."""
    programs = [name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name) is None]
    return machines.missing() or (f"there is no {programs[0]}" if programs else "")


class Slurm(Machines):
    """The cluster of host1, host2, ...; ``environment`` is what its commands need."""

    def __init__(self, hosts: int) -> None:
        super().__init__(hosts)
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        super().__enter__()
        self.run_slurm("scontrol", "reconfigure")
        wait(lambda: "idle" in self.run_slurm("sinfo", "--noheader", "--format=%t"))
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait()
        super().__exit__()

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's commands."""
        return {"SLURM_CONF": f"{self.folder}/slurm.conf"}

    def run_slurm(self, *command: str) -> str:
        """What one of Slurm's commands says."""
        done = subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, text=True)
        return done.stdout + done.stderr

    def allocate(self, *options: str) -> str:
        """Hold nodes; returns the job's number."""
        said = self.run_slurm("salloc", "--no-shell", *options)
        found = re.search(r"job allocation (\d+)", said)
        assert found is not None, said
        return found[1]

    def submit(self, *options: str) -> str:
        """Have a job that runs until it is ended, or waits for nodes; returns its number."""
        return self.run_slurm("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep infinity", *options).strip()

    def end(self, job: str) -> None:
        """End the job, and wait for that."""
        self.run_slurm("scancel", job)
        wait(lambda: job not in self.run_slurm("squeue", "--noheader", "--format=%i").split())

    def prepare(self) -> None:
        key = Path(self.folder, "key")
        key.touch(mode=0o400)
        key.write_bytes(secrets.token_bytes(128))
        address = f"NodeAddr={self.net}.{{}}"
        nodes = [
            f"NodeName=host{host} {address.format(host + 1)} CPUs=2 RealMemory=2000"
            for host in range(1, self._count + 1)
        ]
        text = _CONFIGURATION.format(
            name=socket.gethostname(),
            net=self.net,
            port=6820 + self.number,
            folder=self.folder,
            nodes="\n".join(nodes),
            count=self._count,
        )
        Path(self.folder, "slurm.conf").write_text(text)
        Path(self.folder, "state").mkdir()
        own = [f"--{name}={self.folder}/{name}" for name in ("log-file", "seed-file", "pid-file")]
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge", *own]
        self._start(munged)
        wait(lambda: os.path.exists(f"{self.folder}/munge"))
        self._start(["slurmctld", "-D", "-c"])

    def add(self, host: int) -> None:
        super().add(host)
        self._start([*self.inside(host), "slurmd", "-D", "-N", f"host{host}"])

    def _start(self, command: list[str]) -> None:
        log = open(f"{self.folder}/log", "ab")
        with log:
            self._daemons.append(
                subprocess.Popen(
                    [*TERMINATED, *command],
                    env={**os.environ, **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
