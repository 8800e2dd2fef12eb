"""Where the task of a command line runs: on a cluster, or on an embedded stack for the time of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cli.here import DEFAULT_RUN_DIR
from cli.launch.allocation import Allocation
from cli.launch.environment import OF_DEVICES
from cli.stack.devices import MOST, Device, Division, divide, found
from services.agent.machine.hardware import VISIBLE_VARIABLE, Devices
from shared.errors import InvalidInput, UnicronError
from shared.service.tokens import Scope
from shared.settings.endpoints import DEFAULT_SERVER
from unicron_client.connection import Connection

LOOK_S = 2.0
"""How long a server at the default address may take to answer. It is on this machine, and answers in milliseconds."""


class Place(NamedTuple):
    """Where a task runs.

    ``server``: address of a cluster's; None: an embedded stack is started, in ``run_dir``. ``said``: a line for the
    user.
    """

    server: str | None
    run_dir: Path
    said: str


def place_of(server: str | None, run_dir: Path | None, allocation: Allocation | None = None) -> Place:
    """Return where a task runs: on the server that is named, or listens at the default address, or embedded.

    Args:
        server: as the user has named it, or ``UNICRON_SERVER`` has.
        run_dir: as the user has named it; an embedded stack is meant then.
        allocation: the nodes on which srun has started this command; an embedded stack is meant then, too.

    Raises:
        InvalidInput: a server is given where an embedded stack is meant.
    """
    if server is not None:
        if allocation is not None:
            problem = f"has one process submit a task, and srun has started {allocation.nodes}: srun --ntasks 1"
            raise InvalidInput.of("--server", server, problem, f"--server, UNICRON_SERVER: {server!r} {problem}")
        if run_dir is not None:
            problem = "is of an embedded stack, and --server or UNICRON_SERVER names a cluster"
            raise InvalidInput.of("--run-dir", str(run_dir), problem)
        return Place(server, DEFAULT_RUN_DIR, f"runs on the cluster of {server}")
    folder = run_dir or DEFAULT_RUN_DIR
    if allocation is not None:
        said = f"runs on the {allocation.nodes} nodes of this srun, in an embedded stack for the time of the run"
        return Place(None, folder, f"{said} ({folder})")
    if run_dir is None and _takes_tasks(DEFAULT_SERVER):
        return Place(DEFAULT_SERVER, DEFAULT_RUN_DIR, f"runs on the cluster of {DEFAULT_SERVER}, which answers there")
    return Place(None, folder, f"runs on this machine, in an embedded stack for the time of the run ({folder})")


def _takes_tasks(server: str) -> bool:
    """Return whether a server answers there that takes this user's tasks."""
    try:
        with Connection(server, timeout_s=LOOK_S) as connection:
            return Scope(connection.get("/v1/actor")["scope"]).includes(Scope.SUBMIT)
    except (UnicronError, ValueError, TypeError, KeyError):
        return False


def devices_of(in_front: Mapping[str, str], wanted: Device) -> Devices:
    """Return the devices that the command may use, which may say so itself with a variable in front."""
    return Devices() if wanted is Device.CPU else found(in_front.get(VISIBLE_VARIABLE))


def division(there: Devices, wanted: Device, workers: int, nodes: int = 1) -> Division:
    """Return how the workers of a task are placed on this machine: on a device each, or all of them on the CPU.

    Where there are devices, a task that needs more of them than there are does not train on the CPU by itself.

    Args:
        there: the devices of this machine.
        wanted: what workers are to train on.
        workers: of the task.
        nodes: machines, of which this is one, and each has as many.

    Raises:
        InvalidInput: the nodes cannot have as many workers each, or there are more than one machine takes.
        NoDevice: workers were to train on devices, and there are too few.
    """
    if workers % nodes:
        problem = f"must be a multiple of {nodes}, the nodes of this srun"
        raise InvalidInput.of("--workers", workers, problem)
    workers //= nodes
    if workers > MOST:
        problem = f"must be at most {MOST} on one machine; --server names a cluster"
        raise InvalidInput.of("--workers", workers, problem)
    if wanted is Device.AUTO and there.entries:
        wanted = Device.CUDA
    return divide(there, wanted, 1, workers, who="the task")


def inherited(in_front: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in front of a command that processes of an embedded stack inherit."""
    return {name: value for name, value in in_front.items() if name not in OF_DEVICES}
