"""The folder in which the nodes of one ``srun`` meet, on a file system that they share.

    here-<node>       made by each other node, once it has found the folder
    refused-<node>    why a node does not take part
    offer.json        what each node's agent is to have (``Offer``)
    keys              the key directory of the bus; a node's credential says where that is, once it listens
    beat              touched again and again by the first process, which then has not ended
    leave             the agents are to end
    end               the exit status of the first process, which is that of all

The first process makes the folder, with mode 0700: its keys are for this user alone, and for this one ``srun``.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from shared.bus import credentials
from shared.bus.identities import node_identity
from shared.errors import Conflict, InvalidInput, Unavailable
from shared.machine.durable_files import replace_file
from shared.model import Model
from shared.nats.key_directory import KeyDirectory

COME_S = 120.0
"""Within this time all processes find the folder. srun starts them within seconds, and each imports for some; a network
file system may hide a new folder from other nodes for a minute (``acdirmax`` of NFS)."""

OFFER_S = 600.0
"""For the first process to be ready for the others: it may run the user's script up to ``pretrain()`` before."""

END_S = 120.0
"""From the end of the agents to that of the first process, which ends its services and writes post-mortems."""

BEAT_S = 5.0
"""Time between two signs of life of the first process: a request to a file server each."""

POLL_S = 0.5
"""Time between two looks at the folder. Nothing of a training waits for one, and each is a request to a file server."""

FOLDER = "allocations"
"""Folder of all meetings, in the run directory."""

T = TypeVar("T")


class Offer(Model):
    """What the agent of each node gets: slots for workers, whether each has a device, and the fork servers' Pythons."""

    workers_per_node: int
    on_devices: bool
    interpreters: str = ""


class Meeting:
    """One ``srun``'s folder.

    Args:
        run_dir: the run directory, which all nodes share.
        name: of this ``srun``.
        node: this process's.
        nodes: how many there are.
    """

    def __init__(self, run_dir: Path, name: str, node: str, nodes: int) -> None:
        self.node, self.nodes = node, nodes
        self.folder = run_dir.resolve() / FOLDER / name
        self.keys = KeyDirectory(self.folder / "keys")

    # ---- the first process

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder for a block; with its end all other nodes end, too, with its exit status.

        Raises:
            Conflict: there is one.
            Unavailable: it cannot be made.
        """
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700)
        except FileExistsError as err:
            raise Conflict(f"{self.folder} is of another run: remove it, or give another --run-dir") from err
        except OSError as err:
            raise Unavailable(f"{self.folder}: {err.strerror or err}") from err
        status = 1
        try:
            yield
            status = 0
        except BaseException as err:
            # UnicronError and typer.Exit have one.
            status = getattr(err, "exit_code", 1)
            raise
        finally:
            self._close(status)

    async def others(self, limit_s: float = COME_S) -> list[str]:
        """Return the names of the other nodes, once all of them have found the folder.

        Raises:
            Unavailable: some have not, or do not take part.
        """

        def found() -> list[str] | None:
            if refusals := self.refusals():
                raise Unavailable("; ".join(refusals))
            come = self._nodes("here-")
            return come if len(come) == self.nodes - 1 else None

        try:
            return await _until(found, limit_s)
        except TimeoutError as err:
            come = [self.node, *self._nodes("here-")]
            raise Unavailable(
                f"{len(come)} of {self.nodes} nodes ({', '.join(come)}) have found {self.folder} within {limit_s:g} s: "
                f"--run-dir must name a folder that all nodes share"
            ) from err

    def offer(self, offer: Offer) -> None:
        """Say what the agents are to have. The credentials come later, with the bus."""
        self._write("offer.json", offer.model_dump_json())

    def refusals(self) -> list[str]:
        """Return why nodes do not take part."""
        return [f"{node}: {self._read(f'refused-{node}')}" for node in self._nodes("refused-")]

    async def keep_beating(self) -> None:
        """Show the other nodes that this process has not ended, until cancelled."""
        while True:
            with suppress(OSError):
                (self.folder / "beat").touch()
            await asyncio.sleep(BEAT_S)

    def ask_to_leave(self) -> None:
        """Have the agents of the other nodes end."""
        self._write("leave", "")

    def _close(self, status: int) -> None:
        """Say with which exit status all end; nobody can use the keys any more."""
        shutil.rmtree(self.keys.path, ignore_errors=True)
        with suppress(OSError):
            self._write("end", str(status))

    # ---- the others

    async def join(self, limit_s: float = COME_S) -> None:
        """Wait for the folder, and say that this node is there.

        Raises:
            Unavailable: it does not come, or is not this user's alone.
        """
        deadline = time.monotonic() + limit_s
        while self.folder.name not in _names(self.folder.parent):
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{self.node} finds no {self.folder} after {limit_s:g} s, which the first process of this srun "
                    "makes: --run-dir must name a folder that all nodes share"
                )
            await asyncio.sleep(POLL_S)
        found = self.folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise Unavailable(f"{self.folder} is not a folder that this user alone may enter")
        self._write(f"here-{self.node}", "")

    async def offered(self, limit_s: float = OFFER_S) -> Offer | None:
        """Return what this node's agent is to have, once the bus listens; None: the first process has ended.

        Raises:
            Unavailable: neither comes to be.
        """

        def found() -> tuple[Offer | None] | None:
            if self.status is not None:
                return (None,)
            return (self._offer(),) if self.servers() else None

        try:
            (offer,) = await _until(found, limit_s)
        except TimeoutError as err:
            problem = f"the first process of this srun has offered nothing in {self.folder} after {limit_s:g} s"
            raise Unavailable(problem) from err
        return offer

    @property
    def credential(self) -> Path:
        """Where this node's credential is, once there is one."""
        return self.keys.credential_file(node_identity(self.node))

    def servers(self) -> list[str]:
        """Return where the bus listens; nothing: it does not yet."""
        with suppress(InvalidInput):
            return credentials.read(self.credential).servers
        return []

    def refuse(self, why: str) -> None:
        """Say why this node does not take part."""
        with suppress(OSError):
            self._write(f"refused-{self.node}", why)

    @property
    def beat(self) -> int:
        """A number that changes as long as the first process lives."""
        try:
            return (self.folder / "beat").stat().st_mtime_ns
        except OSError:
            return 0

    @property
    def is_over(self) -> bool:
        """Whether the agents are to end."""
        return bool({"leave", "end"} & _names(self.folder))

    @property
    def status(self) -> int | None:
        """The exit status of the first process; None: it has not ended."""
        return int(self._read("end")) if "end" in _names(self.folder) else None

    async def ended(self, limit_s: float = END_S) -> int:
        """Return the exit status of the first process, once it has ended.

        Raises:
            Unavailable: it does not say so.
        """
        try:
            return await _until(lambda: self.status, limit_s)
        except TimeoutError as err:
            raise Unavailable(f"the first process of this srun has left no exit status in {self.folder}") from err

    # ---- files

    def _offer(self) -> Offer:
        return Offer.model_validate_json(self._read("offer.json"))

    def _nodes(self, prefix: str) -> list[str]:
        return sorted(name.removeprefix(prefix) for name in _names(self.folder) if name.startswith(prefix))

    def _read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def _write(self, name: str, text: str) -> None:
        replace_file(self.folder / name, text.encode(), mode=0o600)


def _names(folder: Path) -> set[str]:
    """Return the names in a folder; none if there is no folder.

    A listing asks the file server anew (close-to-open consistency of NFS), which a look for one name need not.
    """
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


async def _until(found: Callable[[], T | None], limit_s: float) -> T:
    """Return what ``found`` returns, once that is something.

    Raises:
        TimeoutError: the limit has passed.
    """
    deadline = time.monotonic() + limit_s
    while (value := found()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(POLL_S)
    return value
