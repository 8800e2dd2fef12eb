"""What a node's preflight has measured: how fast it does what training does."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.model import Model
from shared.names import Name
from shared.text import amount

Quantity = Literal[
    "matrix products",
    "device memory",
    "all-reduce",
    "all-reduce with a neighbour",
    "processor matrix products",
    "host memory",
    "disk write",
    "disk read",
]
"""What is measured (``unicron.process.preflight``). ``all-reduce``: its bus bandwidth, among devices or processes."""

NEIGHBOUR: Quantity = "all-reduce with a neighbour"

Verdict = Literal["accepted", "refused", "reported", "slow"]
"""What is decided on a measurement. ``reported``: there is nothing to compare it with, or it is not to count. ``slow``:
it was reported, and is slow beside nodes that were measured later: the node is in use, and stays so."""

FLOP_QUANTITIES = ("matrix products", "processor matrix products")
"""Quantities in FLOP/s; all others are in bytes/s."""

DeviceName = Annotated[str, Field(max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")]

Line = Annotated[str, Field(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""What a node says in words, which people read on terminals."""


class Rate(Model):
    """A measured rate, in FLOP/s or bytes/s. ``device``: number of the device; None: it is of the whole node.

    ``peer``: the neighbour with which it was measured; None: it is of this node alone.
    ``bound``: the least rate that is not slow; None: there is nothing to compare with. ``basis``: what the bound
    follows from, or why there is none; empty: nobody has judged yet.
    """

    quantity: Quantity
    device: Annotated[int, Field(ge=0, le=1024)] | None = None
    peer: Name | None = None
    value: Annotated[float, Field(ge=0, le=1e24)]
    bound: float | None = None
    basis: str = ""

    @property
    def is_slow(self) -> bool:
        """Whether the rate is below its bound."""
        return self.bound is not None and self.value < self.bound

    @property
    def name(self) -> str:
        """What was measured, and where."""
        place = "" if self.device is None else f" of device {self.device}"
        return f"{self.quantity}{place}{'' if self.peer is None else f', {self.peer}'}"

    @property
    def unit(self) -> str:
        """FLOP/s or B/s."""
        return "FLOP/s" if self.quantity in FLOP_QUANTITIES else "B/s"

    def __str__(self) -> str:
        """Return the rate in words."""
        bound = "" if self.bound is None else f", at least {amount(self.bound, self.unit)} expected"
        basis = f" ({self.basis})" if self.basis else ""
        return f"{self.name}: {amount(self.value, self.unit)}{bound}{basis}"


class Measurement(Model):
    """What one preflight has measured.

    ``device``: name of the devices by the driver, or of the processor where there is none; ``count``: how many devices
    or cores. Nodes with the same of both are alike. ``rates``: in the order of the measuring. ``problems``: what was
    not measured, and why.
    """

    device: DeviceName
    count: Annotated[int, Field(ge=0, le=1 << 20)]
    rates: Annotated[list[Rate], Field(max_length=256)] = Field(default_factory=list)
    problems: Annotated[list[Line], Field(max_length=64)] = Field(default_factory=list)

    def is_like(self, other: Measurement) -> bool:
        """Return whether the two are of nodes that are alike, so that their rates should be equal."""
        return (self.device, self.count) == (other.device, other.count)

    def __str__(self) -> str:
        """Return what was measured on, in words."""
        return f"{self.count} x {self.device}"
