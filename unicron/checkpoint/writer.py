"""The writer of persistent checkpoints: copied at a step boundary, written beside training, complete or absent.

``Writer.begin`` copies (milliseconds); a thread of each rank then writes that rank's part
(``unicron.checkpoint.parts``): its share of what data-parallel ranks have in common, and what it alone has. When the
agreement at the end of a step has shown that every part is written, rank 0's thread publishes the checkpoint
(``unicron.checkpoint.archive``). No rank waits for a peer in between. The next generation deletes what a fault leaves
unfinished.
"""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from unicron import device
from unicron.checkpoint import archive, parts, storage
from unicron.checkpoint.archive import Manifest, PartFile
from unicron.errors import UnicronError
from unicron.link.waiting import Wait
from unicron.megatron.parallel import data_group
from unicron.state import transfer
from unicron.state.copied_shares import copied_chunks, shared_chunks
from unicron.state.rank_state import RankState
from unicron.state.user_chunks import document_chunk
from unicron.state.user_state import Record

WRITTEN, WRITING, FAILED = 0, 1, 2
"""The status of a rank's part of the checkpoint in progress (``WRITTEN`` also if there is none); the worst of all ranks
counts."""


class Outcomes(NamedTuple):
    """A function that is called, on the writer's thread, with the outcome of a checkpoint."""

    published: Callable[[int, str], None]
    """Called on rank 0, with step and location, once the checkpoint is published."""
    failed: Callable[[int, str], None]
    """Called with step and reason, on the ranks that know why there is no checkpoint."""


PROGRESS_S = 1.0
"""How often a rank that waits for a checkpoint shows that it does: often beside the least limit for a rank that stands
still outside of steps, 120 s."""


@dataclass(slots=True)
class _Part:
    """One rank's part of one checkpoint."""

    location: str
    """The place to which the checkpoint goes."""
    step: int
    digest: str
    written: Future[None]


class Writer:
    """Writes this rank's part of checkpoints in a thread; on rank 0, publishes those that all ranks have written."""

    def __init__(self, keep: int, order_samples: int = 0) -> None:
        """Prepare.

        Args:
            keep: how many published checkpoints of the task to leave.
            order_samples: samples from whose number the order of all samples was drawn; 0: not known.
        """
        self._keep, self._order_samples = keep, order_samples
        self.unusable = ""
        """Why there can be no checkpoints in this generation; empty: there can be."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unicron-checkpoint")
        self._part: _Part | None = None
        self._publication: Future[None] | None = None
        self._protected: list[str] = []
        self._reason = ""
        """Why the newest checkpoint was given up, if this rank knows that."""

    @property
    def status(self) -> int:
        """The status of this rank's part: ``WRITTEN``, ``WRITING`` or ``FAILED``."""
        part = self._part
        if part is None:
            return WRITTEN
        if not part.written.done():
            return WRITING
        return WRITTEN if part.written.exception() is None else FAILED

    @property
    def idle(self) -> bool:
        """Whether no checkpoint is in progress: the same on all ranks."""
        return self._part is None

    def enter(self, location: str, generation: int, protected: str) -> None:
        """Enter a generation and give up what an older one was writing.

        Args:
            location: where a checkpoint of the new generation would be.
            generation: its number.
            protected: the checkpoint from which it started, if any.
        """
        self._part = None
        self._protected = [protected] if protected else []
        if dist.get_rank() == 0:
            self._thread.submit(archive.clean, location, generation)

    def begin(self, rank_state: RankState, location: str, record: Record | None = None) -> None:
        """Copy this rank's part of the state and begin to write it; all ranks call it.

        Args:
            rank_state: the rank's.
            location: where the checkpoint goes.
            record: the user's state at the same boundary, if there is any.

        Raises:
            RuntimeError: the device failed.
        """
        self._reason = ""
        written: Future[None] = Future()
        try:
            if self.unusable:
                raise UnicronError(self.unusable)
            group = data_group()
            shared = copied_chunks(rank_state, [group.rank()], group.size())
            if record is not None:
                shared |= shared_chunks(record.chunks, [group.rank()], group.size())
                if dist.get_rank() == 0:
                    content = torch.frombuffer(bytearray(record.content), dtype=torch.uint8)
                    shared[document_chunk(len(content))] = content
        except UnicronError as err:  # there is no place, or a state that cannot be named: no reason to end the training
            written.set_exception(err)
        else:
            chunks = {chunk: values.to("cpu", copy=True) for chunk, values in shared.items()}
            written = self._thread.submit(_write_part, location, dist.get_rank(), chunks)
        self._part = _Part(location, rank_state.applied, rank_state.digest.hex(), written)

    def agreed(self, status: int, outcomes: Outcomes) -> Future[None] | None:
        """Act on the worst status of all ranks.

        Args:
            status: that status.
            outcomes: called with the outcome.

        Returns: On rank 0, the publication in progress, or the deletion of what was written.
        """
        part = self._part
        if part is None or status == WRITING:
            return None
        self._part = None
        if status == FAILED:
            cause = part.written.exception() if part.written.done() else None
            if cause is not None:
                self._give_up(part, cause, outcomes)
            return self._thread.submit(storage.delete, part.location) if dist.get_rank() == 0 else None
        if dist.get_rank() != 0:
            return None
        self._publication = self._thread.submit(self._publish, part, dist.get_world_size(), outcomes)
        return self._publication

    def complete(self, outcomes: Outcomes, wait: Wait, progress: Callable[[], None]) -> str:
        """Wait until the checkpoint in progress is published, if there is one; all ranks call it.

        Args:
            outcomes: as for ``agreed``.
            wait: waits for a collective.
            progress: called once in a while: a checkpoint may take longer than a rank may stand still.

        Returns: Why it was not published, in words, the same on all ranks; empty if it was, or if there is none.

        Raises:
            RuntimeError: a collective failed.
        """
        if self._publication is not None:
            _wait_for(self._publication, progress)  # this may be the end of the process
        if self._part is None:
            return ""
        while (status := self._worst_status(self._part)) == WRITING:
            progress()
        rest = self.agreed(status, outcomes)
        if rest is not None:
            _wait_for(rest, progress)  # what is deleted is gone before another rank writes there again
        return next((reason for reason in transfer.gather(self._reason, wait) if reason), "")

    def _worst_status(self, part: _Part) -> int:
        """Return the worst status of all ranks, after the part is written or a while has passed."""
        futures.wait([part.written], timeout=PROGRESS_S)
        worst = torch.tensor(self.status, device=device.current())
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return int(worst)

    def _publish(self, part: _Part, world_size: int, outcomes: Outcomes) -> None:
        try:
            files: dict[str, PartFile] = {}
            for rank in range(world_size):
                files |= _part_of(part.location, rank)
            manifest = Manifest(step=part.step, digest=part.digest, files=files, order_samples=self._order_samples)
            archive.publish(part.location, manifest)
        except Exception as err:
            self._give_up(part, err, outcomes)
            raise
        outcomes.published(part.step, part.location)
        for rank in range(world_size):
            storage.delete(f"{part.location}/{parts.record_of(rank)}")  # the manifest has the record now
        archive.retire(part.location, self._keep, [*self._protected, part.location])

    def _give_up(self, part: _Part, error: BaseException, outcomes: Outcomes) -> None:
        """Say why there is no checkpoint, in the rank's output and to the agent."""
        reason = str(error) if isinstance(error, UnicronError) else f"{type(error).__name__}: {error}"
        self._reason = reason
        print(f"unicron: checkpoint {part.location} is given up: {reason}", file=sys.stderr, flush=True)
        outcomes.failed(part.step, reason)


def _wait_for(done: Future[None], progress: Callable[[], None]) -> None:
    while not futures.wait([done], timeout=PROGRESS_S).done:
        progress()


def _part_of(location: str, rank: int) -> dict[str, PartFile]:
    """Return the files of a rank's part, which the rank has written.

    Raises:
        UnicronError: rank 0 does not see them.
    """
    try:
        return parts.read_record(location, rank)
    except FileNotFoundError as err:
        raise UnicronError(
            f"rank {rank} has written its part, and rank 0 does not see it in {posixpath.dirname(location)}: "
            "the nodes do not share this place"
        ) from err


def _write_part(location: str, rank: int, chunks: parts.Chunks) -> None:
    """Write a rank's files and then what rank 0 needs to know of them."""
    parts.write_record(location, rank, parts.write(location, rank, chunks))
