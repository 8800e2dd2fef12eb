"""The machines of a task whose ranks print much, for ``benchmarks.viewers``.

Each has its files, and the part of an agent that serves them. All are in one process, which writes what ranks print.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from services.agent.files.file_server import FileServer
from services.agent.files.rank_users import RankUsers
from services.agent.files.task_secrets import TaskSecrets
from shared.bus import credentials
from shared.bus.connection import Bus

LINE = b"iteration 00000000/ 500000 | consumed samples: 0000000 | elapsed time (ms): 412.7 | lm loss: 2.31E+00\n"
"""As long as the lines that Megatron-LM prints for a step."""

_WRITE_S = 0.05


@dataclass(frozen=True)
class Printing:
    """What is printed. ``files``: of ranks, as (node, name of the file); ``credentials``: of the nodes, by name."""

    nats_url: str
    task: str
    files: tuple[tuple[str, str], ...]
    credentials: dict[str, str]
    folder: str
    bytes_per_s: int


def print_and_serve(printing: Printing) -> None:
    """Print and serve until the process is ended."""
    asyncio.run(_print_and_serve(printing))


async def _print_and_serve(printing: Printing) -> None:
    async with AsyncExitStack() as stack:
        for node, credential in printing.credentials.items():
            bus = await Bus.connect(printing.nats_url, credential=credentials.read(Path(credential)), name=node)
            stack.push_async_callback(bus.close)
            server = FileServer(bus, node, Path(printing.folder, node), RankUsers(""), TaskSecrets())
            stack.callback(server.stop)
            await server.start()
        outputs = []
        for node, name in printing.files:
            path = Path(printing.folder, node, "tasks", printing.task, "output", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            outputs.append(stack.enter_context(path.open("ab", buffering=0)))  # noqa: ASYNC230 - a local file
        began_s, printed_bytes = time.monotonic(), 0
        while True:
            due_bytes = int((time.monotonic() - began_s) * printing.bytes_per_s) - printed_bytes
            each = LINE * (due_bytes // len(outputs) // len(LINE))
            for output in outputs:
                output.write(each)
            printed_bytes += len(each) * len(outputs)
            await asyncio.sleep(_WRITE_S)
