"""Faults that a user asks for (``unicron inject``): how they are written, and the requests of the api to agents.

``KIND[=ARGUMENT]`` names a fault. Faults of ``OF_RANKS`` strike one rank of a task at a step, those of ``OF_NODES`` a
node at once. The api logs ``fault.injected`` between two requests: the first only asks whether the fault can happen
(``judge``), so that nothing is logged that is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field

from shared.bus.endpoints import Endpoint
from shared.bus.messages import REASON_CHARACTERS, Integer, Message, MessageId
from shared.errors import InvalidInput

HANGS = ("stop", "sleep", "deadlock", "spin", "collective")
"""Arguments of ``hang``; without an argument the first one counts."""

FOREVER = "forever"
"""Argument of ``disconnect``: until the agent ends."""

MOST_TIMES = 100.0
"""Largest factor of ``slow``: a rank that is slower does not end a step within the limits for a hang."""

MOST_SPIKE = 1e6
"""Largest factor of ``spike``: the mean of losses stays finite in every precision that reports them."""

DEFAULT_SPIKE = 10.0
"""Factor of ``spike`` without an argument: beyond every spike that training has by itself."""

LONGEST_AWAY_S = 86_400.0
"""Longest absence of ``disconnect`` that ends."""

DEFAULT_AWAY_S = 10.0
"""Absence of ``disconnect`` without an argument: several times what is allowed before a node counts as silent."""

MOST_PARAMETER = 200
"""Characters of a parameter's name."""

OF_RANKS = {
    "kill": "kill",
    "exception": "exception",
    "hang": f"hang[={'|'.join(HANGS)}]",
    "slow": f"slow=FACTOR, 1 to {MOST_TIMES:g}; slow=1 ends it",
    "nan": "nan[=PARAMETER]",
    "spike": f"spike[=FACTOR], above 1, at most {MOST_SPIKE:g}",
    "oom": "oom",
}
"""Kind of a rank's fault -> how it is written."""

OF_NODES = {
    "disconnect": f"disconnect[=SECONDS|{FOREVER}], above 0, at most {LONGEST_AWAY_S:g} s",
    "xid": "xid=CODE[:DEVICE], a code of NVIDIA's from 1 to 999 and the number of a device of the node",
}
"""Kind of a node's fault -> how it is written."""


@dataclass(frozen=True, slots=True)
class RequestedFault:
    """A fault as it is written. ``argument``: with its default filled in; empty: the kind has none."""

    kind: str
    argument: str = ""

    @property
    def text(self) -> str:
        """The fault in full, as the log has it."""
        return f"{self.kind}={self.argument}" if self.argument else self.kind

    @property
    def of_rank(self) -> bool:
        """Whether the fault strikes a rank; otherwise it strikes a node."""
        return self.kind in OF_RANKS

    @property
    def away_s(self) -> float:
        """Seconds of a ``disconnect``; infinite if it never ends."""
        return math.inf if self.argument == FOREVER else float(self.argument)

    @property
    def xid(self) -> tuple[int, int]:
        """Code and device of an ``xid``."""
        code, _, device = self.argument.partition(":")
        return int(code), int(device or 0)


def parse(text: str) -> RequestedFault:
    """Return the fault that a text names.

    Raises:
        InvalidInput: there is no such kind, or its argument is not allowed.
    """
    kind, given, argument = text.partition("=")
    written = OF_RANKS.get(kind) or OF_NODES.get(kind)
    if written is None:
        kinds = ", ".join((*OF_RANKS.values(), *OF_NODES.values()))
        raise refusal("fault", text, f"unknown kind; allowed: {kinds}")
    found = _argument(kind, argument) if given else _DEFAULTS.get(kind)
    if found is None or (given and not argument):
        raise refusal("fault", text, f"must be {written}")
    return RequestedFault(kind, found)


_DEFAULTS = {
    "kill": "",
    "exception": "",
    "hang": HANGS[0],
    "nan": "",
    "spike": f"{DEFAULT_SPIKE:g}",
    "oom": "",
    "disconnect": f"{DEFAULT_AWAY_S:g}",
}
"""Arguments of the kinds that need none."""


def _argument(kind: str, argument: str) -> str | None:
    """Return an argument if the kind allows it."""
    match kind:
        case "hang":
            return argument if argument in HANGS else None
        case "slow":
            return argument if 1.0 <= _number(argument) <= MOST_TIMES else None
        case "spike":
            return argument if 1.0 < _number(argument) <= MOST_SPIKE else None
        case "nan":
            return argument if len(argument) <= MOST_PARAMETER and argument.isprintable() else None
        case "disconnect":
            return argument if argument == FOREVER or 0.0 < _number(argument) <= LONGEST_AWAY_S else None
        case "xid":
            code, _, device = argument.partition(":")
            numbers = code.isascii() and code.isdecimal() and (not device or (device.isascii() and device.isdecimal()))
            return argument if numbers and 1 <= int(code[:4]) <= 999 and len(device) <= 3 else None
        case _:
            return None


def _number(text: str) -> float:
    """Return a finite number; NaN, which no bound allows, for any other text."""
    try:
        return float(text) if len(text) <= 20 and math.isfinite(float(text)) else math.nan
    except ValueError:
        return math.nan


def refusal(field: str, value: object, problem: str) -> InvalidInput:
    """Return the error of a request for a fault that is refused."""
    return InvalidInput.of(field, value, problem, f"fault refused: {field}: {problem} (given: {value!r})")


class FaultRequest(Message):
    """Have a fault happen. ``judge``: only say whether it could.

    ``fault_id``: id of the event in the log; an agent lets a fault happen once. ``fault``: as it is written. ``task``,
    ``worker``, ``rank``: whom a rank's fault strikes. ``step``: the step at which it happens; None: the next one that
    the rank begins.
    """

    fault_id: MessageId
    fault: str = Field(max_length=300)
    judge: bool = False
    task: str = ""
    worker: str = ""
    rank: Integer | None = None
    step: Integer | None = None


class FaultResult(Message):
    """The answer. ``problem``: why the fault cannot happen; empty: it can, or is on its way.

    ``field``: the field of the user's request that the problem is about. ``disabled``: whether injecting is not enabled
    on the node.
    """

    incarnation: MessageId
    problem: str = Field(default="", max_length=REASON_CHARACTERS)
    field: str = "fault"
    disabled: bool = False


FAULTS = Endpoint("unicron.faults.*", FaultRequest, FaultResult, by=("api",), to=("node",), timeout_s=3.0)
"""An answer takes milliseconds; a busy machine has a hundred times that."""
