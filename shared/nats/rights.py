"""The rights of each identity on the bus: the subjects that it may publish to and subscribe to.

``RIGHTS`` is the one table, which follows from the endpoints (``shared.messages.endpoints``): the authorization of
nats-server is made from it, and docs/security.md shows it. Three rules:

* A node publishes on subjects that end with its own name, and subscribes to such only. The receiver compares the
  subject with the name in the message (``Endpoint.read``), so a node speaks for no other.
* Replies go to an inbox, whose subject begins with the identity of whoever asked, and ends with random text. Nodes may
  publish to the inboxes of the services that ask them, and read none but their own. (NATS's ``allow_responses`` would
  need no such right. It forgets who may answer after two minutes, and when a node is added; a command takes longer.)
* The log's stream and JetStream are the services' alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from shared.bus.endpoints import NOTHING
from shared.bus.identities import NODE, SERVICES, inbox_prefix, node_identity, node_of
from shared.messages.endpoints import ENDPOINTS
from shared.messages.health import AGENT, HEALTH


class Rights(NamedTuple):
    """Subjects, with NATS's wildcards, that an identity may publish to and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


_LOG = ("unicron.log.>", "$JS.API.>", "$JS.ACK.>")
"""The subjects that relaying and following the log takes (``shared.log``)."""

_NODE = "{node}"
"""A text that stands for the node's name in the table."""


def _of_service(name: str) -> Rights:
    """Return the rights of a service: its endpoints, and what all services do."""
    own = HEALTH.at(name)
    published = [endpoint.subject for endpoint in ENDPOINTS if name in endpoint.by]
    heard = [endpoint.subject for endpoint in ENDPOINTS if name in endpoint.to and endpoint is not HEALTH]
    inboxes = [f"{inbox_prefix(service)}.>" for service in SERVICES]
    if any(NODE in one.by and name in one.to and one.reply is not NOTHING for one in ENDPOINTS):
        inboxes.append(f"{inbox_prefix(node_identity('*'))}.>")
    # A container's probe asks for a service's health with the service's credential.
    health = [] if HEALTH.subject in published else [own]
    return Rights((*published, *health, *_LOG, *inboxes), (*heard, own, f"{inbox_prefix(name)}.>"))


def _of_node() -> Rights:
    """Return the rights of a node: its endpoints, and to answer the services that ask it."""
    health, own = HEALTH.at(f"{AGENT}{_NODE}"), f"{inbox_prefix(node_identity(_NODE))}.>"
    answered = [one for one in ENDPOINTS if NODE in one.to and one.reply is not NOTHING]
    asking = [service for service in SERVICES if any(service in one.by for one in answered)]
    return Rights(
        (
            *(endpoint.at(_NODE) for endpoint in ENDPOINTS if NODE in endpoint.by),
            *(f"{inbox_prefix(service)}.>" for service in asking),
            health,
            own,
        ),
        (
            *(one.at(_NODE) for one in ENDPOINTS if NODE in one.to and one is not HEALTH),
            health,
            own,
        ),
    )


RIGHTS: Mapping[str, Rights] = {NODE: _of_node()} | {name: _of_service(name) for name in SERVICES}
"""Service, or ``node`` -> its rights; ``{node}`` stands for the node's name."""

RightsOf = Callable[[str], Rights | None]
"""A function that returns the rights of an identity; None: all."""


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
    # Lists of JSON are lists of NATS's configuration. An empty list would allow everything, but none is empty.
    publish, subscribe = (json.dumps(subjects) for subjects in allowed)
    return (
        f"    # {identity}\n"
        f"    {{ nkey: {key}, permissions: {{\n      publish: {publish}\n      subscribe: {subscribe}\n    }} }}"
    )
