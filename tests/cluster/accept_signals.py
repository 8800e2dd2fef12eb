"""Accepts the signals of agents in the detector's place and does nothing about them.

``accept_signals.py URL CREDENTIAL``: with the detector's.

So a signal gets lost of which its agent believes that it has arrived. The detector must not run meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import nats
from nats.aio.msg import Msg

from shared.bus import credentials
from shared.messages.signals import SIGNALS


async def accept(url: str, credential: str) -> None:
    """Accept until the process is killed. Each signal is printed: its kind and its worker."""

    async def answer(message: Msg) -> None:
        signal = SIGNALS.request.decode(message.data)
        print(signal.kind, getattr(signal, "worker", ""), flush=True)
        await message.respond(SIGNALS.reply.encode(None))

    client = await nats.connect(url, nkeys_seed_str=credentials.read(Path(credential)).seed)
    await client.subscribe(SIGNALS.subject, cb=answer)
    await client.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(accept(sys.argv[1], sys.argv[2]))
