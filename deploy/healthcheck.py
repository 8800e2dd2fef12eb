"""Ask one service for its health over NATS: exit status 0 when it is ready, 1 when it is not or does not answer.

For container health checks: ``python -P deploy/healthcheck.py planner``. Where NATS is and its token come from the
same ``UNICRON_*`` variables that the service itself reads.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import nats
from nats.errors import Error

from shared.settings import Settings

TIMEOUT_S = 2.0
"""A healthy service answers within milliseconds; the container's probe interval is several seconds."""


async def ask(service: str, settings: Settings) -> dict[str, Any]:
    """Return the answer of a service: at least ``ready``.

    Raises:
        nats.errors.Error: NATS cannot be reached, or nobody answers.
        ValueError: the answer is not JSON.
    """
    client = await nats.connect(
        settings.nats_url,
        token=settings.nats_token or None,
        allow_reconnect=False,
        connect_timeout=TIMEOUT_S,
        error_cb=_ignore,
    )
    try:
        reply = await client.request(f"unicron.health.{service}", b"", timeout=TIMEOUT_S)
        health: dict[str, Any] = json.loads(reply.data)
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
    try:
        health = asyncio.run(asyncio.wait_for(ask(arguments[0], Settings()), 2 * TIMEOUT_S))
    except (Error, OSError, TimeoutError, ValueError) as err:
        print(f"{arguments[0]}: {type(err).__name__}: {err}", file=sys.stderr)
        return 1
    print(json.dumps(health))
    return 0 if health.get("ready") is True else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
