"""A Slurm cluster on the machines of the cluster test bed: slurmctld on ``login``, a slurmd on each node."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from cli.stack.machine import RANK_NICE
from tests.cluster import relay
from tests.cluster.bed import DOMAIN, FIRST_NODE_NUMBER, hosts_file
from tests.cluster.control import API_PORT
from tests.cluster.holder import DISK
from tests.cluster.machine import Machine, MachineFailed, Process
from tests.cluster.network import ROOT, Network
from tests.condition import until_blocking
from tests.e2e.kit import Client
from tests.slurm.requirements import SEARCH_PATH

LOGIN = "login"
"""The machine of slurmctld, on which jobs are submitted."""

START_S = 60.0
"""A daemon starts within a second; several share the cores."""

COMMAND_S = 120.0
"""For a command of Slurm or Unicron: a second or two; the machine may be busy."""

JOB_S = 300.0
"""For a job to come to a state: it waits for the signal before its time limit, or for a new start."""

SCRIPT = ROOT / "deploy" / "slurm" / "unicron.sbatch"

POLL_S = 0.5
"""Time between two looks at a job, each of which is a process, in waits of minutes."""

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={login}({login_address})
SlurmUser=root
AuthType=auth/munge
# A job that was requeued starts so many seconds later at the earliest (120 without this).
AuthInfo=socket={disk}/munge/socket,cred_expire=30
CredType=cred/munge
StateSaveLocation={disk}/slurmctld
SlurmdSpoolDir={disk}/slurmd
SlurmctldPidFile={disk}/slurmctld.pid
SlurmdPidFile={disk}/slurmd.pid
# Signals go to a task's own process, as with proctrack/cgroup, for which not every test machine has the rights.
ProctrackType=proctrack/pgid
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
# A machine that is off is found out by slurmctld after this time; the tests say so before.
SlurmdTimeout=300
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
PartitionName=urgent Nodes=ALL PriorityTier=2 MaxTime=INFINITE
"""
"""No cgroups, no accounting; everything is on the machines' own disks."""


class Slurm:
    """A cluster; a context manager.

    Args:
        folder: shared by all machines, as on a cluster with a shared file system; it outlives the cluster.
        nodes: number of node machines, named ``n0``, ``n1``, ...
    """

    def __init__(self, folder: Path, *, nodes: int) -> None:
        self.folder = folder
        self.network = Network(seed=1)
        numbers = {LOGIN: 1} | {f"n{i}": FIRST_NODE_NUMBER + i for i in range(nodes)}
        self.machines = {
            name: Machine(
                name, number, self.network, folder / name, hosts=hosts_file(name, numbers), hostname=f"{name}.{DOMAIN}"
            )
            for name, number in numbers.items()
        }
        self.nodes = {name: machine for name, machine in self.machines.items() if name != LOGIN}
        self._variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("UNICRON_", "SLURM_"))},
            # As after `source .venv/bin/activate`.
            "PATH": f"{Path(sys.executable).parent}:{SEARCH_PATH}",
            "SLURM_CONF": str(folder / "slurm.conf"),
            # Goes with the machine: a script that loses its power cannot remove what it has in it.
            "TMPDIR": DISK,
        }

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={machine.address} CPUs={os.cpu_count()} RealMemory=1024"
            for name, machine in self.nodes.items()
        )
        login = self.machines[LOGIN]
        text = _CONFIGURATION.format(login=LOGIN, login_address=login.address, disk=DISK, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        for machine in self.machines.values():
            machine.power_on()
        for machine in self.machines.values():
            machine.wait_ready()
            self._start_munged(machine)
        login.path(f"{DISK}/slurmctld").mkdir()
        login.start(["slurmctld", "-D"], output="slurmctld.log", environment=self._variables)
        for name in self.nodes:
            self._start_slurmd(name)
        until_blocking(
            lambda: self.states() == dict.fromkeys(self.nodes, "idle"), "all nodes are idle", limit_s=START_S
        )

    def _stop(self) -> None:
        for machine in self.machines.values():
            machine.power_off()
        self.network.close()

    def _start_munged(self, machine: Machine) -> None:
        place = machine.path(f"{DISK}/munge")
        place.mkdir(mode=0o755)
        command = ["munged", "--foreground", "--key-file", str(self.folder / "munge.key")]
        for option in ("socket", "pid-file", "log-file", "seed-file"):
            command += [f"--{option}", f"{DISK}/munge/{option}"]
        machine.start(command, output="munged.log", environment=self._variables)
        until_blocking((place / "socket").exists, "munged answers", limit_s=START_S)

    def _start_slurmd(self, node: str) -> None:
        machine = self.nodes[node]
        machine.path(f"{DISK}/slurmd").mkdir()
        machine.start(["slurmd", "-D", "-N", node], output="slurmd.log", environment=self._variables)

    # ---- what users type

    def run(self, *command: str, **variables: str) -> str:
        """Run a command on the login machine; return its output.

        Raises:
            MachineFailed: it failed.
        """
        login = self.machines[LOGIN]
        (login.folder / "command.log").unlink(missing_ok=True)
        process = login.start(command, output="command.log", environment=self._variables | variables)
        code = login.wait(process, COMMAND_S)
        text = process.output.read_text(errors="replace")
        if code != 0:
            raise MachineFailed(f"{command} ended with {code}:\n{text[-2000:]}")
        return text

    def submit(self, run_dir: Path, *options: str, settings: Mapping[str, str] | None = None) -> str:
        """Submit the script, with a run directory; return the job's number."""
        variables = {"UNICRON_RUN_DIR": str(run_dir), "UNICRON_RANK_NICE": str(RANK_NICE), **(settings or {})}
        output = f"--output={self.folder / 'job.log'}"
        return self.run("sbatch", "--parsable", output, *options, str(SCRIPT), **variables).strip()

    def states(self) -> dict[str, str]:
        """Return the state of each node, as Slurm shows it; empty while slurmctld does not answer."""
        try:
            lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        except MachineFailed:
            return {}
        return dict((line.split()[0], line.split()[1]) for line in lines)

    def job(self, job: str) -> dict[str, str]:
        """Return what Slurm shows of a job."""
        fields = self.run("scontrol", "show", "job", "--oneliner", job).split()
        return {name: value for name, _, value in (field.partition("=") for field in fields)}

    def hosts(self, job: str) -> list[str]:
        """Return the nodes of a job, the first one first."""
        return self.run("scontrol", "show", "hostnames", self.job(job)["NodeList"]).split()

    def until_job(self, job: str, state: str, **fields: str) -> None:
        """Wait until a job is in a state, with these fields."""
        wanted = {"JobState": state, **fields}
        until_blocking(
            lambda: wanted.items() <= self.job(job).items(),
            f"job {job} is {wanted}",
            limit_s=JOB_S,
            seen=lambda: self.job(job),
        )

    # ---- the control plane

    def client(self, node: str, port: int = API_PORT) -> Client:
        """Return a client of the API on a node, which may be about to start."""
        machine = self.nodes[node]
        socket = f"{DISK}/api.sock"
        process: Process = machine.start(
            [sys.executable, relay.__file__, socket, "127.0.0.1", str(port)], output="relay.log"
        )
        machine.wait_for_line(process, "ready", START_S)
        return Client("http://localhost", transport=httpx.HTTPTransport(uds=str(machine.path(socket))))
