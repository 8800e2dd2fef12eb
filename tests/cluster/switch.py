"""A switch in user space: forwards Ethernet frames between TAP devices, with delay, loss and cuts.

A program (``python -m tests.cluster.switch FD``) so that load in the test process delays no frame; it is controlled
over a channel by ``network.Network`` and ends with it. Each direction between two machines is a link with rules of its
own. The rules apply when a frame enters the switch: a cut does not reach frames that are already on their way.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field

from tests.cluster import channel

MAX_FRAME_BYTES = 1 << 16
"""No frame is longer: the largest MTU of a TAP device is 65,521 bytes."""

BURST = 64
"""Frames that are read from one device before the others have their turn."""


@dataclass
class Link:
    """One direction between two machines.

    ``loss`` is the part of frames that is lost at random, by a generator of the link's own: what happens on one link
    does not depend on the traffic of another.
    """

    random: random.Random
    delay_s: float = 0.0
    loss: float = 0.0
    cut: bool = False
    forwarded: int = 0
    dropped: int = 0

    def takes(self) -> bool:
        """Return whether the next frame goes through, and count it."""
        taken = not self.cut and (self.loss == 0.0 or self.random.random() >= self.loss)
        self.forwarded += taken
        self.dropped += not taken
        return taken


@dataclass(frozen=True)
class Port:
    """A machine's device; ``address`` is its Ethernet address."""

    name: str
    fd: int
    address: bytes


@dataclass
class Switch:
    """Ports, links between them, and frames on their way."""

    seed: int
    ports: dict[str, Port] = field(default_factory=dict)
    by_address: dict[bytes, Port] = field(default_factory=dict)
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    _late: list[tuple[float, int, Port, bytes]] = field(default_factory=list)
    """A heap of (time due, number, receiver, frame)."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def plug(self, port: Port) -> None:
        self.ports[port.name] = self.by_address[port.address] = port

    def unplug(self, name: str) -> Port | None:
        port = self.ports.pop(name, None)
        if port is not None:
            del self.by_address[port.address]
            self._late = [item for item in self._late if item[2] is not port]
            heapq.heapify(self._late)
            os.close(port.fd)
        return port

    def link(self, source: str, target: str) -> Link:
        """Return a link; it begins without faults. It outlives its machines, so that a machine can come back."""
        key = (source, target)
        if key not in self.links:
            self.links[key] = Link(random.Random(f"{self.seed}/{source}/{target}"))
        return self.links[key]

    def forward(self, source: Port, frame: bytes, now: float) -> None:
        """Send a frame towards its receivers: one, or all others for a group address (ARP)."""
        if frame[0] & 1:
            targets = [port for port in self.ports.values() if port is not source]
        else:
            found = self.by_address.get(frame[:6])
            targets = [found] if found is not None else []
        for target in targets:
            link = self.link(source.name, target.name)
            if not link.takes():
                continue
            if link.delay_s:
                heapq.heappush(self._late, (now + link.delay_s, next(self._numbers), target, frame))
            else:
                _deliver(target, frame)

    def deliver_due(self, now: float) -> None:
        """Deliver the delayed frames that are due."""
        while self._late and self._late[0][0] <= now:
            _, _, target, frame = heapq.heappop(self._late)
            _deliver(target, frame)

    def next_due_s(self, now: float) -> float | None:
        """Return the time until the next delayed frame is due; None if there is none."""
        return max(0.0, self._late[0][0] - now) if self._late else None


def _deliver(target: Port, frame: bytes) -> None:
    try:
        os.write(target.fd, frame)
    except OSError:
        pass  # the machine's device is down or gone: the frame is lost, as on a real wire


class Program:
    """The event loop around a switch."""

    def __init__(self, control: socket.socket, seed: int) -> None:
        self._control = control
        self._switch = Switch(seed)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def run(self) -> None:
        """Forward frames until the other end of the channel is closed."""
        while True:
            for key, _ in self._selector.select(self._switch.next_due_s(time.monotonic())):
                if key.data is not None:
                    self._read(key.data)
                    continue
                try:
                    request, fds = channel.receive(self._control)
                except EOFError:
                    return
                channel.send(self._control, self._answer(request, fds))
            self._switch.deliver_due(time.monotonic())

    def _read(self, port: Port) -> None:
        """Forward what a device has sent."""
        if port.name not in self._switch.ports:
            return  # unplugged in this turn of the loop
        for _ in range(BURST):
            try:
                frame = os.read(port.fd, MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            except OSError:
                self._unplug(port.name)  # the machine is gone
                return
            self._switch.forward(port, frame, time.monotonic())

    def _answer(self, request: channel.Message, fds: list[int]) -> channel.Message:
        match request["op"]:
            case "plug":
                self._unplug(request["name"])
                port = Port(request["name"], fds[0], bytes.fromhex(request["address"]))
                os.set_blocking(port.fd, False)
                self._switch.plug(port)
                self._selector.register(port.fd, selectors.EVENT_READ, port)
            case "unplug":
                self._unplug(request["name"])
            case "set":
                link = self._switch.link(request["source"], request["target"])
                link.delay_s, link.loss, link.cut = request["delay_s"], request["loss"], request["cut"]
            case "count":
                link = self._switch.link(request["source"], request["target"])
                return {"forwarded": link.forwarded, "dropped": link.dropped}
        return {}

    def _unplug(self, name: str) -> None:
        if name in self._switch.ports:
            self._selector.unregister(self._switch.ports[name].fd)
            self._switch.unplug(name)


def main() -> None:
    """Run a switch that is controlled over the inherited socket."""
    fd, seed = sys.argv[1:]
    Program(socket.socket(fileno=int(fd)), int(seed)).run()


if __name__ == "__main__":
    main()
