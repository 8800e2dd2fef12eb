"""The result of a task: parameters in one file, and a summary of how they came about.

A file system may be slow. So a thread of rank 0 writes, and all ranks wait for it together, and show that they do: a
result that takes minutes is no hang.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from unicron import device
from unicron.checkpoint import export, storage
from unicron.checkpoint.writer import PROGRESS_S
from unicron.link.waiting import Wait
from unicron.protocol.messages import Configure, Finished
from unicron.state import transfer
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
    """Writes the result, as often as it takes."""

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
            state: after the last update.
            loss: of the last update; None: unknown to this rank.
            wait: waits for a collective.
            progress: called once in a while.

        Returns:
            What this rank reports to its agent; and why the result could not be written, the same on all ranks, empty
            if it is.

        Raises:
            RuntimeError: a peer was lost meanwhile.
            Exception: rank 0 cannot write it for a reason that no storage has.
        """
        path = Path(configure.directory) / "result" / "parameters.safetensors"
        is_first = configure.rank == 0
        parameters = export.full_parameters(state.model, progress)
        written: Future[None] = Future()
        if is_first:
            summary = {"steps": state.applied, "samples_sha256": state.digest.hex(), "loss": loss}
            written = self._thread.submit(_write, path, parameters, json.dumps(summary) + "\n")
        else:
            written.set_result(None)
        while agreed(0 if futures.wait([written], timeout=PROGRESS_S).done else 1, wait):
            progress()
        error = written.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        reasons = transfer.gather(f"{type(error).__name__}: {error}" if error is not None else "", wait)
        finished = Finished(
            generation=configure.generation,
            rank=configure.rank,
            step=state.applied,
            samples_sha256=state.digest.hex() if is_first else "",
            parameters_path=str(path) if is_first else "",
            loss=loss,
        )
        return finished, next((reason for reason in reasons if reason), "")


def _write(path: Path, parameters: dict[str, torch.Tensor], summary: str) -> None:
    export.write(parameters, path)
    # Behind the parameters, as it says of what they are.
    storage.write_whole(str(path.with_name("summary.json")), summary.encode())
