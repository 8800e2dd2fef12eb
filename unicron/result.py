"""The result of a task: its parameters (``unicron.checkpoint.export``), and a summary of how they came about.

A file system may be slow. So a thread of each rank writes, and all ranks wait for it together, and show that they do: a
result that takes minutes is no hang.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from unicron import device
from unicron.checkpoint import export, target
from unicron.link.waiting import Wait
from unicron.protocol.messages import Configure, Finished
from unicron.state.rank_state import RankState


def agreed(value: int, wait: Wait) -> int:
    """Return the largest of all ranks' values.

    Raises:
        RuntimeError: a peer was lost.
    """
    largest = torch.tensor(value, device=device.current())
    wait(dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True))
    return int(largest)


class Result:
    """A writer of the result, which tries as often as it takes."""

    def __init__(self) -> None:
        """Begin: nothing is written."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unicron-result")

    def write(
        self,
        configure: Configure,
        state: RankState,
        loss: float | None,
        wait: Wait,
        progress: Callable[[], None],
    ) -> tuple[Finished, str]:
        """Write the result, all ranks together; rank 0 has the summary.

        Args:
            configure: the generation; the result lies in its directory.
            state: the state after the last update.
            loss: the loss of the last update; None: unknown to this rank.
            wait: waits for a collective.
            progress: called once in a while.

        Returns:
            What this rank reports to its agent; and why the result could not be written, the same on all ranks, empty
            if it was written.

        Raises:
            RuntimeError: a peer was lost meanwhile.
            Exception: a rank cannot write it for a reason that has nothing to do with storage.
        """
        folder = Path(configure.directory) / "result"
        is_first = configure.rank == 0
        summary = {"steps": state.applied, "samples_sha256": state.digest.hex(), "loss": loss}
        exported = export.export(
            state.model,
            folder,
            self._thread,
            beside={"summary.json": (json.dumps(summary) + "\n").encode()},
            nodes=target.nodes_of(configure.members),
            wait=wait,
            progress=progress,
        )
        finished = Finished(
            generation=configure.generation,
            rank=configure.rank,
            step=state.applied,
            samples_sha256=state.digest.hex() if is_first else "",
            parameters_path=str(exported.path) if is_first else "",
            loss=loss,
        )
        return finished, exported.reason
