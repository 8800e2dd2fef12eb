"""The writer of persistent checkpoints: copied at a step boundary, written beside training, complete or absent.

``Writer.begin`` plans and copies (all ranks, milliseconds); a thread of each rank then writes that rank's part. When
the agreement at the end of a step has shown that every part is written, rank 0's thread publishes the checkpoint
(``unicron.checkpoint.archive``). No rank waits for a peer in between. The next generation deletes what a fault leaves
unfinished.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from unicron import device
from unicron.checkpoint import archive, plain
from unicron.checkpoint.archive import Manifest
from unicron.errors import UnicronError
from unicron.link.waiting import Wait
from unicron.megatron.distributed_checkpoint import SavePlanner, WriteResults, state_dict
from unicron.megatron.model import is_megatron
from unicron.state import transfer
from unicron.state.rank_state import RankState

WRITTEN, WRITING, FAILED = 0, 1, 2
"""The status of a rank's part of the checkpoint in progress (``WRITTEN`` also if there is none); the worst of all ranks
counts."""


class Outcomes(NamedTuple):
    """What is called, on the writer's thread, with the outcome of a checkpoint."""

    published: Callable[[int, Path], None]
    """On rank 0, with step and path, once the checkpoint is published."""
    failed: Callable[[int, str], None]
    """With step and reason, on the ranks that know why there is no checkpoint."""


@dataclass(slots=True)
class _Part:
    """One rank's part of one checkpoint."""

    path: Path
    step: int
    digest: str
    write: Callable[[], tuple[WriteResults, list[str]]]
    """Writes the part's files; returns what rank 0 needs for the description, and the files' names."""
    describe: Callable[[list[WriteResults]], list[str]]
    """On rank 0: writes the description of all parts; returns the names of its files."""
    written: Future[None] | None = None


class Writer:
    """Writes this rank's part of checkpoints in a thread; on rank 0, publishes those that all ranks have written."""

    def __init__(self, keep: int) -> None:
        """Args: keep: how many published checkpoints of the task to leave."""
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unicron-checkpoint")
        self._planner: SavePlanner | None = None
        self._part: _Part | None = None
        self._publication: Future[None] | None = None
        self._protected: list[Path] = []
        self._reason = ""
        """Why the newest checkpoint was given up, where this rank knows it."""

    @property
    def status(self) -> int:
        """The status of this rank's part: ``WRITTEN``, ``WRITING`` or ``FAILED``."""
        part = self._part
        if part is None or part.written is None:
            return WRITTEN
        if not part.written.done():
            return WRITING
        return WRITTEN if part.written.exception() is None else FAILED

    @property
    def idle(self) -> bool:
        """Whether no checkpoint is in progress: the same on all ranks."""
        return self._part is None

    def enter(self, path: Path, generation: int, protected: str) -> None:
        """Enter a generation and give up what an older one was writing.

        Args:
            path: where a checkpoint of the new generation would be.
            generation: its number.
            protected: the checkpoint from which it started, if any.
        """
        self._part, self._planner = None, None
        self._protected = [Path(protected)] if protected else []
        if dist.get_rank() == 0:
            self._thread.submit(archive.clean, path, generation)

    def begin(self, rank_state: RankState, path: Path) -> None:
        """Copy the state and begin to write it; all ranks call it.

        Raises:
            RuntimeError: a collective failed; the folder will not exist.
        """
        folder = archive.partial_path(path)
        folder.mkdir(parents=True, exist_ok=True)
        step, digest = rank_state.applied, rank_state.digest.hex()
        position = {"step": step, "digest": digest}
        if is_megatron(rank_state.model):
            self._planner = self._planner or SavePlanner()
            planned = self._planner.plan(state_dict(rank_state.model, rank_state.optimizer) | position, folder)
            write, describe = planned
        else:
            write_file = plain.plan(rank_state, position, folder)
            write, describe = (lambda: ([], write_file())), (lambda parts: [])
        part = _Part(path, step, digest, write, describe)
        self._reason = ""
        part.written = self._thread.submit(_write_part, part, dist.get_rank())
        self._part = part

    def agreed(self, status: int, outcomes: Outcomes) -> Future[None] | None:
        """Act on the worst status of all ranks.

        Args:
            status: that status.
            outcomes: called with the outcome.

        Returns:
            The publication in progress, on rank 0.
        """
        part = self._part
        if part is None or status == WRITING:
            return None
        self._part = None
        if status == FAILED:
            cause = part.written.exception() if part.written is not None and part.written.done() else None
            if cause is not None:
                self._give_up(part, cause, outcomes)
            self._thread.submit(shutil.rmtree, archive.partial_path(part.path), ignore_errors=True)
            return None
        if dist.get_rank() != 0:
            return None
        self._publication = self._thread.submit(self._publish, part, dist.get_world_size(), outcomes)
        return self._publication

    def complete(self, outcomes: Outcomes, wait: Wait) -> str:
        """Wait until the checkpoint in progress is published, if there is one; all ranks call it.

        Args:
            outcomes: as for ``agreed``.
            wait: waits for a collective.

        Returns:
            Why it was not, in words, the same on all ranks; empty if it was, or if there is none.

        Raises:
            RuntimeError: a collective failed.
        """
        if self._publication is not None:
            self._publication.exception()  # waits: this may be the end of the process
        if self._part is None:
            return ""
        assert self._part.written is not None
        self._part.written.exception()  # waits
        worst = torch.tensor(self.status, device=device.current())
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        publication = self.agreed(int(worst), outcomes)
        if publication is not None:
            publication.exception()  # waits
        return next((reason for reason in transfer.gather(self._reason, wait) if reason), "")

    def _publish(self, part: _Part, world_size: int, outcomes: Outcomes) -> None:
        folder = archive.partial_path(part.path)
        try:
            results: list[WriteResults] = []
            files: dict[str, tuple[int, str]] = {}
            for rank in range(world_size):
                record = folder / _record(rank)
                if not record.exists():
                    raise UnicronError(
                        f"rank {rank} has written its part, and rank 0 does not see it in {part.path.parent}: "
                        "the nodes do not share this directory"
                    )
                rank_results, rank_files = pickle.loads(record.read_bytes())
                results.append(rank_results)
                files |= rank_files
                record.unlink()
            files |= {name: archive.checksum(folder / name) for name in part.describe(results)}
            archive.publish(part.path, Manifest(step=part.step, digest=part.digest, files=files))
        except Exception as err:
            self._give_up(part, err, outcomes)
            raise
        outcomes.published(part.step, part.path)
        archive.retire(part.path, self._keep, [*self._protected, part.path])

    def _give_up(self, part: _Part, error: BaseException, outcomes: Outcomes) -> None:
        """Say why there is no checkpoint, in the rank's output and to the agent."""
        reason = str(error) if isinstance(error, UnicronError) else f"{type(error).__name__}: {error}"
        self._reason = reason
        print(f"unicron: checkpoint {part.path} is given up: {reason}", file=sys.stderr, flush=True)
        outcomes.failed(part.step, reason)


def _record(rank: int) -> str:
    return f".part-{rank}"


def _write_part(part: _Part, rank: int) -> None:
    """Write a rank's files and then what rank 0 needs to know of them."""
    folder = archive.partial_path(part.path)
    results, names = part.write()
    files = {name: archive.checksum(folder / name) for name in names}
    record = folder / _record(rank)
    with open(record, "wb") as file:
        pickle.dump((results, files), file)
        file.flush()
        os.fsync(file.fileno())
