"""The system under measurement: an embedded stack, a client of it and a corpus, in a folder that goes with them."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.stack.processes import run_module
from cli.stack.stack import Stack
from cli.waiting import WaitingClient

POLL_S = 0.02
"""Time between two looks of the client. The events' own times are measured; a look only finds that they have come."""


@dataclass(frozen=True)
class Embedded:
    """A running stack. ``corpus``: a generated text of about 1 MB, the same every time."""

    stack: Stack
    client: WaitingClient
    corpus: Path


@asynccontextmanager
async def embedded(nodes: int, workers_per_node: int, *, run_dir: Path | None = None) -> AsyncIterator[Embedded]:
    """Start a stack, and stop it at the end.

    Args:
        nodes: number of its nodes.
        workers_per_node: workers of each node.
        run_dir: the stack's folder, which stays; None: a temporary one.
    """
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="unicron-benchmark-")))
        corpus = folder / "corpus.txt"
        await run_module("unicron.trainer.corpus", str(corpus))
        async with (
            Stack(run_dir or folder / "run", nodes=nodes, workers_per_node=workers_per_node) as stack,
            WaitingClient(stack.url, poll_s=POLL_S) as client,
        ):
            yield Embedded(stack, client, corpus)


def small_task(name: str, corpus: Path, **changes: Any) -> dict[str, Any]:
    """Return a task of the size that the published comparisons use: a small GPT, steps of about 100 ms."""
    return {
        "name": name,
        "model": {"layers": 2, "hidden": 64, "heads": 4, "sequence_length": 64},
        "batch": {"global": 12, "micro": 1},
        "steps": 1_000_000,
        "data": str(corpus),
        "workers": {"min": 1, "max": 4},
        **changes,
    }
