"""What this machine's kernel says of ports and of PCIe: files below ``/sys``, and lines of ``/dev/kmsg``.

``look`` reads; what follows from it is decided by pure functions, which the state of the earlier looks is given to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cli.watch.trouble import Severity, Trouble, key_of
from shared.errors import Unavailable

ACTIVE = "ACTIVE"

DOWN_LOOKS = 3
"""How many looks in succession have to find a port down: a link that is trained anew is back before."""

FLAPS = ("link_downed", "link_error_recovery")
"""Counters of a port's lost and recovered links (InfiniBand specification, PortCounters)."""

MOST_FLAPS = 3
"""Lost links within ``FLAPS_S`` from which on a port is a trouble. One is what a restarted switch costs."""

FLAPS_S = 3600.0
"""The time in which lost links are counted, seconds."""

RECORD_BYTES = 8192
"""Longest record of /dev/kmsg (``PRINTK_MESSAGE_MAX`` and the text of its dictionary)."""


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an InfiniBand or RoCE device. ``state``: such as ``ACTIVE``; ``counters``: those of ``FLAPS``."""

    state: str
    physical: str
    counters: Mapping[str, int]


@dataclass(slots=True)
class Seen:
    """What earlier looks have seen of a port.

    Attributes:
        was_active: whether it has been active; a port that never was has no cable.
        down: looks in succession that have found it not active.
        counters: its counters at the newest look.
        flaps: when how many links were lost, of the last ``FLAPS_S``; seconds of a monotonic clock.
    """

    was_active: bool = False
    down: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    flaps: list[tuple[float, int]] = field(default_factory=list)


def read_ports(root: Path) -> dict[str, Port]:
    """Return the ports below ``sys/class/infiniband``, by ``<device>/<port>``. Files that go away are left out."""
    found = {}
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        state, physical = _text(folder / "state"), _text(folder / "phys_state")
        if state is not None:
            counters = {
                name: int(text) for name in FLAPS if (text := _text(folder / "counters" / name) or "").isdigit()
            }
            name = f"{folder.parent.parent.name}/{folder.name}"
            found[name] = Port(_named(state), _named(physical or ""), counters)
    return found


def of_ports(node: str, ports: Mapping[str, Port], seen: dict[str, Seen], now_s: float) -> list[Trouble]:
    """Return the troubles of ports. ``seen``: of the looks before; this one is added. ``now_s``: a monotonic time."""
    found = []
    for name in sorted(ports.keys() | seen.keys()):
        before = seen.setdefault(name, Seen())
        port = ports.get(name, Port("gone", "gone", before.counters))
        before.down = 0 if port.state == ACTIVE else before.down + 1
        before.was_active |= port.state == ACTIVE
        lost = sum(max(0, value - before.counters.get(at, value)) for at, value in port.counters.items())
        before.counters = port.counters
        before.flaps = [(at_s, n) for at_s, n in (*before.flaps, (now_s, lost)) if n and now_s - at_s < FLAPS_S]
        flaps = sum(number for _, number in before.flaps)
        evidence = {"port": name, "state": port.state, "phys_state": port.physical, **port.counters}
        if before.was_active and before.down >= DOWN_LOOKS:
            reason = f"port {name} is {port.state} ({port.physical}), and was active"
            found.append(Trouble(node, key_of("port", name), "error", reason, evidence))
        elif flaps >= MOST_FLAPS:
            reason = f"port {name} has lost its link {flaps} times within an hour"
            found.append(Trouble(node, key_of("port", name), "warning", reason, evidence))
    return found


KERNEL: tuple[tuple[str, Severity, str], ...] = (
    ("pcie-fatal", "error", r"AER: Uncorrect(?:ed|able) \(Fatal\) error"),
    ("pcie-nonfatal", "warning", r"AER: Uncorrect(?:ed|able) \(Non-Fatal\) error"),
    ("pcie-recovery", "error", r"AER: device recovery failed"),
    ("pcie-link", "error", r"pciehp.*Link Down|has fallen off the bus"),
    ("nic-health", "error", r"mlx5_core.*(?:device's health compromised|Fatal error \d+ detected|unrecoverable)"),
    ("nic-hung", "warning", r"NETDEV WATCHDOG: .* transmit queue \d+ timed out"),
    ("nic-hot", "warning", r"mlx5_core.*[Hh]igh temperature"),
)
"""Key, severity and pattern of the kernel's lines that are troubles; other lines are none."""


def of_kernel(node: str, lines: list[str]) -> list[Trouble]:
    """Return the troubles in lines of the kernel's log: of each key the newest line."""
    found: dict[str, Trouble] = {}
    for line in lines:
        for key, severity, pattern in KERNEL:
            if re.search(pattern, line):
                found[key] = Trouble(node, key_of("kernel", key), severity, line, {"line": line})
    return list(found.values())


class Machine:
    """This machine. ``root``: the folder that has its ``sys`` and ``dev``.

    Raises:
        Unavailable: the kernel's log cannot be read.
    """

    def __init__(self, node: str, root: Path) -> None:
        self._node, self._root, self._seen = node, root, dict[str, Seen]()
        self._path = root / "dev/kmsg"
        try:
            self._kmsg = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._kmsg, 0, os.SEEK_END)  # what was before is not known to be present still
        except OSError as err:
            raise Unavailable(f"{self._path}: {err.strerror or err}; it needs root or CAP_SYSLOG") from err

    def look(self, now_s: float) -> list[Trouble]:
        """Return the present troubles. ``now_s``: a monotonic time.

        Raises:
            Unavailable: the kernel's log cannot be read any more.
        """
        ports = of_ports(self._node, read_ports(self._root), self._seen, now_s)
        try:
            return ports + of_kernel(self._node, list(self._lines()))
        except OSError as err:
            raise Unavailable(f"{self._path}: {err.strerror or err}") from err

    def _lines(self) -> Iterator[str]:
        """Yield what the kernel has written since the last look. Each read of the device gives one record."""
        while True:
            try:
                record = os.read(self._kmsg, RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:  # the kernel has overwritten what was not read: the next read goes on behind it
                continue
            if not record:
                return
            for line in record.decode(errors="replace").splitlines():
                if not line.startswith(" "):  # the record's dictionary
                    yield line.partition(";")[2] or line


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _named(text: str) -> str:
    """Return the name of a state, which the file has behind its number: ``4: ACTIVE``."""
    return text.partition(":")[2].strip() or text
