"""The rights of each identity on the bus: the subjects that it may publish to and subscribe to.

``RIGHTS`` is the one table: the authorization of nats-server is made from it, and docs/security.md shows it. Three
rules:

* A node publishes on subjects that end with its own name, and subscribes to such only. Who receives compares the
  subject with the name in the message (``shared.messages.senders``), so a node speaks for no other.
* Replies go to an inbox, whose subject begins with the identity of whoever asked, and ends with random text. Nodes may
  publish to the inboxes of the services that ask them, and read none but their own. (NATS's ``allow_responses`` would
  need no such right. It forgets who may answer after two minutes, and when a node is added; a command takes longer.)
* The log's stream and JetStream are the services' alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from shared.bus.identities import NODE, SERVICES, inbox_prefix, node_identity, node_of
from shared.messages.admission import ALIVE, DEPARTURES, HELLO, REVOKED
from shared.messages.agent_restart import AGENT_RESTART
from shared.messages.commands import COMMANDS, LEFTOVERS
from shared.messages.common_time import SUBJECT as TIME
from shared.messages.injection import FAULTS
from shared.messages.limits_in_force import LIMITS
from shared.messages.node_files import FILES
from shared.messages.probes import PROBE
from shared.messages.reachability import ECHO, REACHABILITY
from shared.messages.self_test import SELF_TEST
from shared.messages.signals import HEARTBEATS, SIGNALS
from shared.messages.stacks import STACKS
from shared.service.frame import AGENT, HEALTH


class Rights(NamedTuple):
    """Subjects, with NATS's wildcards, that an identity may publish to and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


_LOG = ("unicron.log.>", "$JS.API.>", "$JS.ACK.>")
"""What relaying and following the log takes (``shared.log``)."""

_ASKING = ("detector", "transition", "api")
"""Services that ask nodes, which answer to their inboxes."""

_NODE = "{node}"
"""Stands for the node's name in the table."""

_NODES = inbox_prefix(node_identity("*"))


def _service(name: str, publish: tuple[str, ...] = (), subscribe: tuple[str, ...] = ()) -> Rights:
    """Return the rights of a service: its own, and what all services do."""
    inboxes = tuple(f"{inbox_prefix(service)}.>" for service in SERVICES)
    # A container's probe asks for a service's health with the service's credential.
    health = f"{HEALTH}.{name}"
    return Rights(
        (*publish, *_LOG, TIME, *(() if f"{HEALTH}.*" in publish else (health,)), *inboxes),
        (*subscribe, TIME, health, f"{inbox_prefix(name)}.>"),
    )


RIGHTS: Mapping[str, Rights] = {
    "detector": _service(
        "detector",
        (
            *(f"{prefix}.*.*" for prefix in (ALIVE, REVOKED)),
            *(f"{prefix}.*" for prefix in (PROBE, STACKS, SELF_TEST, LEFTOVERS)),
            REACHABILITY,
            f"{ECHO}.*",
            f"{_NODES}.>",
        ),
        (f"{HEARTBEATS}.*", f"{SIGNALS}.*", f"{HELLO}.*", f"{DEPARTURES}.*", f"{ECHO}.*", LIMITS),
    ),
    "planner": _service("planner"),
    "transition": _service("transition", (f"{COMMANDS}.*",)),
    "api": _service(
        "api",
        (*(f"{prefix}.*" for prefix in (FILES, SELF_TEST, AGENT_RESTART, FAULTS)), LIMITS, f"{HEALTH}.*"),
        (f"{HEARTBEATS}.*", REACHABILITY),
    ),
    NODE: Rights(
        (
            *(f"{prefix}.{_NODE}" for prefix in (HEARTBEATS, SIGNALS, HELLO, DEPARTURES)),
            f"{HEALTH}.{AGENT}{_NODE}",
            *(f"{inbox_prefix(service)}.>" for service in _ASKING),
            f"{inbox_prefix(node_identity(_NODE))}.>",
        ),
        (
            *(f"{prefix}.{_NODE}" for prefix in (COMMANDS, LEFTOVERS, PROBE, STACKS, FILES, SELF_TEST)),
            *(f"{prefix}.{_NODE}" for prefix in (AGENT_RESTART, FAULTS)),
            f"{ALIVE}.{_NODE}.*",
            f"{REVOKED}.{_NODE}.*",
            f"{HEALTH}.{AGENT}{_NODE}",
            f"{inbox_prefix(node_identity(_NODE))}.>",
        ),
    ),
}
"""Service, or ``node`` -> its rights; ``{node}`` stands for the node's name."""

RightsOf = Callable[[str], Rights | None]
"""Returns the rights of an identity; None: all."""


def rights(identity: str) -> Rights:
    """Return the rights of an identity.

    Raises:
        KeyError: there is no such service.
    """
    node = node_of(identity)
    if node is None:
        return RIGHTS[identity]
    found = RIGHTS[NODE]
    return Rights(*(tuple(subject.replace(_NODE, node) for subject in subjects) for subjects in found))


def authorization(keys: Mapping[str, str], rights_of: RightsOf = rights) -> str:
    """Return the authorization of nats-server: a part of its configuration.

    Args:
        keys: identity -> its public key.
        rights_of: returns the rights of an identity.
    """
    users = [_user(identity, key, rights_of(identity)) for identity, key in sorted(keys.items())]
    return "\n".join(
        [
            "# Made by `unicron keys` and `unicron node`, which write it anew: shared/nats/rights.py has the table.",
            "authorization {",
            "  users: [",
            *users,
            "  ]",
            "}",
            "",
        ]
    )


def _user(identity: str, key: str, allowed: Rights | None) -> str:
    if allowed is None:
        return f"    {{ nkey: {key} }}  # {identity}"
    # Lists of JSON are lists of NATS's configuration. An empty list would allow everything; none is.
    publish, subscribe = (json.dumps(subjects) for subjects in allowed)
    return (
        f"    # {identity}\n"
        f"    {{ nkey: {key}, permissions: {{\n      publish: {publish}\n      subscribe: {subscribe}\n    }} }}"
    )
