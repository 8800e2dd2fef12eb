"""All endpoints of the bus, and docs/bus.md, which lists them: ``make bus-page`` writes it."""

from __future__ import annotations

from typing import Any

from shared.bus.endpoints import NOTHING, Endpoint
from shared.messages.admission import AGENT_RESTART, ALIVE, DEPARTURES, HELLO, REVOKED
from shared.messages.commands import COMMANDS, LEFTOVERS
from shared.messages.common_time import TIME
from shared.messages.health import HEALTH
from shared.messages.injection import FAULTS
from shared.messages.limits_in_force import LIMITS
from shared.messages.node_files import CODE, FILES
from shared.messages.preflight import MEET, NEIGHBOUR, PREFLIGHT
from shared.messages.probes import PROBE
from shared.messages.reachability import ECHO, REACHABILITY
from shared.messages.self_test import SELF_TEST
from shared.messages.signals import HEARTBEATS, SIGNALS
from shared.messages.stacks import STACKS

ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (
    *(HELLO, ALIVE, REVOKED, NEIGHBOUR, MEET, PREFLIGHT, DEPARTURES, HEARTBEATS, SIGNALS),
    *(COMMANDS, LEFTOVERS, AGENT_RESTART, SELF_TEST, PROBE, STACKS, FAULTS, FILES, CODE),
    *(REACHABILITY, LIMITS, ECHO, TIME, HEALTH),
)

_PAGE = """\
# Messages on the bus

`make bus-page` writes this page from what `shared/messages/` declares: who sends what to whom over core NATS. Messages
are JSON, each of the class that is named (`shared/bus/messages.py` has the rules for programs of several versions).
Subjects end with the node's name and, behind it, the agent's incarnation; those of `unicron.health` with a service's
name, or with `agent-` and a node's. Beside these, the log is relayed on `unicron.log.>` with JetStream.

| subject | sent by | received by | request | reply | time-out |
|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the content of docs/bus.md."""
    return _PAGE + "".join(f"| {' | '.join(_cells(endpoint))} |\n" for endpoint in ENDPOINTS)


def _cells(endpoint: Endpoint[Any, Any]) -> tuple[str, ...]:
    one_way = endpoint.reply is NOTHING
    return (
        f"`{endpoint.subject}`",
        ", ".join(endpoint.by),
        ", ".join(endpoint.to),
        endpoint.request.title,
        "(published)" if one_way else endpoint.reply.title,
        "" if one_way else f"{endpoint.timeout_s:g} s",
    )


if __name__ == "__main__":
    print(page(), end="")
