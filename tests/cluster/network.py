"""The network between the bed's machines: starts the switch (``switch.py``) and tells it what fails.

Links have a direction. ``Network.set`` sets one direction; ``between`` sets both, ``isolate`` a machine's links to all
others.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cluster import channel

ROOT = Path(__file__).resolve().parents[2]

ANSWER_S = 10.0
"""The switch answers in microseconds; a machine with busy cores may let it wait."""


class Network:
    """The machines' network; a context manager.

    Args:
        seed: of the random losses.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._names: list[str] = []
        self._channel, theirs = channel.pair()
        self._channel.settimeout(ANSWER_S)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.switch", str(theirs.fileno()), str(seed)],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the switch; all machines' devices vanish."""
        self._channel.close()
        self.process.wait(ANSWER_S)

    def plug(self, name: str, fd: int, address: str) -> None:
        """Connect a machine: ``fd`` is its TAP device, ``address`` its Ethernet address. Links keep their rules."""
        self._ask({"op": "plug", "name": name, "address": address.replace(":", "")}, fd)
        if name not in self._names:
            self._names.append(name)

    def unplug(self, name: str) -> None:
        """Disconnect a machine; its TAP device vanishes."""
        self._ask({"op": "unplug", "name": name})

    def set(self, source: str, target: str, *, delay_s: float = 0.0, loss: float = 0.0, cut: bool = False) -> None:
        """Set the rules of the direction from one machine to another; what is not named is without fault."""
        self._ask({"op": "set", "source": source, "target": target, "delay_s": delay_s, "loss": loss, "cut": cut})

    def between(self, one: str, other: str, *, delay_s: float = 0.0, loss: float = 0.0, cut: bool = False) -> None:
        """Set the rules of both directions between two machines."""
        self.set(one, other, delay_s=delay_s, loss=loss, cut=cut)
        self.set(other, one, delay_s=delay_s, loss=loss, cut=cut)

    def isolate(self, name: str) -> None:
        """Cut all links of a machine."""
        for other in self._names:
            if other != name:
                self.between(name, other, cut=True)

    def heal(self) -> None:
        """Let all links be without fault."""
        for source in self._names:
            for target in self._names:
                if source != target:
                    self.set(source, target)

    def count(self, source: str, target: str) -> tuple[int, int]:
        """Return how many frames were forwarded from one machine to another, and how many were dropped."""
        answer = self._ask({"op": "count", "source": source, "target": target})
        return answer["forwarded"], answer["dropped"]

    def _ask(self, request: channel.Message, *fds: int) -> channel.Message:
        channel.send(self._channel, request, fds)
        return channel.receive(self._channel)[0]
