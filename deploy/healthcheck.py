"""Ask one service for its health over NATS: exit status 0 when it is ready, 1 when it is not or does not answer.

For container health checks: ``python -P deploy/healthcheck.py planner``, or ``agent`` for this machine's agent.
Where NATS is, the credential and the node's name come from the same ``UNICRON_*`` variables that the service itself
reads.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import nats
from nats.errors import Error, NoRespondersError

from shared.bus.credentials import Credential
from shared.bus.identities import inbox_prefix
from shared.bus.nats_client import tls_context
from shared.errors import UnicronError
from shared.machine.process_names import is_here
from shared.messages.health import AGENT
from shared.service.joining import credential_of, joined
from shared.settings.model import read_settings

TIMEOUT_S = 2.0
"""A healthy service answers within milliseconds; the container's probe interval is several seconds."""


async def ask(service: str, servers: list[str], credential: Credential) -> dict[str, Any]:
    """Return the answer of a service: at least ``ready``.

    Args:
        service: its name on the bus.
        servers: URLs of NATS.
        credential: of the service itself.

    Raises:
        nats.errors.Error: NATS cannot be reached, or nobody answers.
        ValueError: the answer is not JSON.
    """
    tls = tls_context(credential.ca) if servers[0].startswith("tls://") else None
    client = await nats.connect(
        servers,
        nkeys_seed_str=credential.seed,
        inbox_prefix=inbox_prefix(credential.identity),
        tls=tls,
        tls_handshake_first=tls is not None,
        allow_reconnect=False,
        # nats-py tries a server that refuses 60 times by default, 2 s apart; the next probe is the next attempt.
        max_reconnect_attempts=1,
        reconnect_time_wait=0,
        connect_timeout=TIMEOUT_S,
        error_cb=_ignore,
    )
    try:
        # All instances of a service answer; this container's is meant.
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox)
        await client.publish(f"unicron.health.{service}", b"", reply=inbox)
        while True:
            reply = await subscription.next_msg(timeout=TIMEOUT_S)
            if not reply.data:
                raise NoRespondersError
            health: dict[str, Any] = json.loads(reply.data)
            if not (process := health.get("process")) or is_here(process):
                return health
    finally:
        await client.close()


async def _ignore(_error: Exception) -> None:
    """The error that matters is raised by the call; nats-py would print it a second time, with its traceback."""


def main(arguments: list[str]) -> int:
    """Ask the service that the only argument names."""
    if len(arguments) != 1:
        print("usage: healthcheck.py SERVICE", file=sys.stderr)
        return 2
    service = arguments[0]
    try:
        settings = read_settings()
        credential = credential_of(settings)
        settings = joined(settings, credential)
        service = f"{AGENT}{settings.node}" if service == "agent" else service
        health = asyncio.run(asyncio.wait_for(ask(service, settings.nats_servers, credential), 2 * TIMEOUT_S))
    except (Error, OSError, TimeoutError, ValueError, UnicronError) as err:
        print(f"{service}: {type(err).__name__}: {err}", file=sys.stderr)
        return 1
    print(json.dumps(health))
    return 0 if health.get("ready") is True else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
