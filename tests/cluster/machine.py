"""One machine of the bed: namespaces of its own for network, mounts, host name, processes and System V memory.

A machine has its own host name, /etc/hosts, /dev/shm, disk and interface. Its processes share the test's other files
(the interpreter, the repository, the test's folder), and the host's clock unless they get one of their own
(``wall_clock.py``). ``holder.py`` is its first process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import channel
from tests.cluster.network import ROOT, Network
from tests.cluster.wall_clock import WallClock
from tests.condition import until_blocking

PREFIX_LENGTH = 24
"""All machines are in 198.51.100.0/24 (TEST-NET-2, RFC 5737), so that no real host is ever meant."""

START_S = 30.0
"""A machine needs about a second, most of it for imports."""

POLL_S = 0.02
"""Pause between two looks at a process's output."""


@dataclass(frozen=True)
class Process:
    """A process on a machine.

    ``pid`` is its number there. ``output`` is the file of its output (standard output and error), which it appends to
    from the byte ``offset`` on.
    """

    pid: int
    output: Path
    offset: int


class MachineFailed(AssertionError):
    """A machine or a process on it did not do what a test needs."""


class Machine:
    """A machine, off at first.

    Args:
        name: its name in the network.
        number: the last part of its address; also makes its Ethernet address.
        network: what it is connected to.
        folder: for its hosts file and the output of its processes; outlives the machine.
        hosts: contents of its /etc/hosts.
        hostname: ``name`` if not given.
        memory_bytes: size of its /dev/shm.
        disk_bytes: size of its disk, which is mounted at ``holder.DISK`` and empty at each start.
        clock_offset_s: by how much the wall clock of its processes is ahead at first; None: they have the host's, which
            no test changes.

    Attributes:
        clock: the wall clock of its processes, which the test may step; None: the host's.
    """

    def __init__(
        self,
        name: str,
        number: int,
        network: Network,
        folder: Path,
        *,
        hosts: str,
        hostname: str = "",
        memory_bytes: int = 256 << 20,
        disk_bytes: int = 1 << 30,
        clock_offset_s: int | None = None,
    ) -> None:
        self.name = name
        self.address = f"198.51.100.{number}"
        self._ethernet = f"02:00:00:00:00:{number:02x}"  # 02: an address that an administrator has given
        self._network = network
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(hosts)
        self._config = {
            "hostname": hostname or name,
            "hosts": str(folder / "hosts"),
            "address": self.address,
            "prefix_length": PREFIX_LENGTH,
            "ethernet": self._ethernet,
            "memory_bytes": memory_bytes,
            "disk_bytes": disk_bytes,
        }
        self.clock: WallClock | None = None
        if clock_offset_s is not None:
            self.clock = WallClock(folder / "clock")
            self.clock.step(clock_offset_s)
        self._holder: subprocess.Popen[bytes] | None = None
        self._ended: dict[int, int] = {}
        self.first_pid = 0
        """The machine's first process, as the test sees it."""

    @property
    def is_on(self) -> bool:
        """Whether the machine's processes may run."""
        return self._holder is not None

    def power_on(self) -> None:
        """Begin to start the machine; ``wait_ready`` waits for the end of that."""
        assert self._holder is None, f"{self.name} is on"
        self._channel, theirs = channel.pair()
        with theirs:
            self._holder = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.holder", json.dumps(self._config), str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._ended = {}

    def wait_ready(self) -> None:
        """Wait until the machine can start processes and is connected."""
        self._channel.settimeout(START_S)
        ready, (device,) = channel.receive(self._channel)
        self.first_pid = ready["ready"]
        self._network.plug(self.name, device, self._ethernet)
        os.close(device)

    def power_off(self) -> None:
        """Cut the power: the network hears no more of the machine, and all its processes end at once."""
        if self._holder is None:
            return
        self._network.unplug(self.name)
        if self.first_pid:
            os.kill(self.first_pid, signal.SIGKILL)
        self._channel.close()
        self._holder.wait(START_S)
        self._holder, self.first_pid = None, 0

    def start(
        self,
        command: Sequence[str],
        *,
        output: str,
        environment: Mapping[str, str] | None = None,
        not_root: bool = False,
    ) -> Process:
        """Start a process.

        Args:
            command: its command line.
            output: name of the file in ``folder`` that its output is appended to.
            environment: all its variables; the test's if not given.
            not_root: whether it is to believe that it is not root.

        Raises:
            MachineFailed: it could not be started.
        """
        path = self.folder / output
        offset = path.stat().st_size if path.exists() else 0
        request = {
            "op": "start",
            "command": list(command),
            "environment": dict(os.environ if environment is None else environment)
            | (self.clock.variables if self.clock is not None else {}),
            "output": str(path),
            "not_root": not_root,
        }
        return Process(self._ask(request)["pid"], path, offset)

    def run(self, command: Sequence[str], *, output: str, limit_s: float = 60.0, not_root: bool = False) -> str:
        """Run a command to its end; return its output.

        Raises:
            MachineFailed: it failed, or took longer than ``limit_s``.
        """
        (self.folder / output).unlink(missing_ok=True)
        process = self.start(command, output=output, not_root=not_root)
        code = self.wait(process, limit_s)
        text = process.output.read_text(errors="replace")
        if code != 0:
            raise MachineFailed(f"{self.name}: {command} ended with {code}:\n{text[-2000:]}")
        return text

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process, by its number on this machine.

        Raises:
            MachineFailed: there is no such process.
        """
        self._ask({"op": "signal", "pid": pid, "signal": int(number)})

    def kill(self, pid: int) -> None:
        """Kill a process, by its number on this machine."""
        self.signal(pid, signal.SIGKILL)

    def exit_code(self, process: Process) -> int | None:
        """Return the exit code of a started process; None while it lives."""
        self._channel.settimeout(0.0)
        while process.pid not in self._ended:
            try:
                self._note(channel.receive(self._channel)[0])
            except BlockingIOError:
                return None
        return self._ended[process.pid]

    def wait(self, process: Process, limit_s: float) -> int:
        """Wait for the end of a process that was started; return its exit code.

        Raises:
            MachineFailed: it lives on after ``limit_s``.
        """
        deadline = time.monotonic() + limit_s
        while process.pid not in self._ended:
            self._channel.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                self._note(channel.receive(self._channel)[0])
            except TimeoutError as err:
                raise MachineFailed(f"{self.name}: process {process.pid} lives after {limit_s} s") from err
        return self._ended[process.pid]

    def wait_for_line(self, process: Process, line: str, limit_s: float) -> None:
        """Wait until a process has written a line.

        Raises:
            MachineFailed: it ended before.
        """

        def written() -> str:
            return process.output.read_bytes()[process.offset :].decode(errors="replace")

        def is_written() -> bool:
            code = self.exit_code(process)
            found = line in (text := written()).splitlines()
            if code is not None and not found:
                raise MachineFailed(
                    f"{self.name}: {process.output.name} ended with {code}, no {line!r}:\n{text[-3000:]}"
                )
            return found

        until_blocking(is_written, f"{self.name}: {process.output.name} has {line!r}", limit_s=limit_s, seen=written)

    def path(self, inside: str) -> Path:
        """Return where the test finds a file of the machine: also one on its disk."""
        return Path(f"/proc/{self.first_pid}/root", inside.lstrip("/"))

    def _ask(self, request: channel.Message) -> channel.Message:
        """Return the answer to a request; ends of processes that come before it are noted."""
        self._channel.settimeout(START_S)
        channel.send(self._channel, request)
        while True:
            answer, _ = channel.receive(self._channel)
            if "error" in answer:
                raise MachineFailed(f"{self.name}: {answer['error']}")
            if "ended" not in answer:
                return answer
            self._note(answer)

    def _note(self, message: channel.Message) -> None:
        self._ended[message["ended"]] = message["code"]
