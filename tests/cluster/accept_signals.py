"""Accepts the signals of agents in the detector's place and does nothing about them: ``accept_signals.py URL TOKEN``.

So a signal gets lost of which its agent believes that it has arrived. The detector must not run meanwhile.
"""

from __future__ import annotations

import asyncio
import sys

import nats
from nats.aio.msg import Msg

from shared.signals import ACCEPTED, SIGNAL, SIGNALS


async def accept(url: str, token: str) -> None:
    """Accept until the process is killed. Each signal is printed: its kind and its worker."""

    async def answer(message: Msg) -> None:
        signal = SIGNAL.validate_json(message.data)
        print(signal.kind, signal.worker, flush=True)
        await message.respond(ACCEPTED)

    client = await nats.connect(url, token=token)
    await client.subscribe(SIGNALS, cb=answer)
    await client.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(accept(sys.argv[1], sys.argv[2]))
