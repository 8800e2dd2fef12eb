"""The copying of one rank's part of the state into its two slots (``unicron.snapshot.files``), in one generation."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from unicron import device
from unicron.snapshot import files
from unicron.snapshot.files import Slot, SnapshotMeta
from unicron.snapshot.transport import Sender
from unicron.state.chunks import StateChunk

PORTION_BYTES = 1 << 19
"""Number of bytes that are copied, then hashed, at a time; a larger tensor is one portion. They fit a second-level
cache."""

LOWEST = 0
"""The lowest priority of a CUDA stream (``torch.cuda.Stream``): where training and copying compete, training comes
first."""


def portions(meta: SnapshotMeta) -> Iterator[tuple[int, int, int]]:
    """Yield for each portion its first chunk, the chunk after its last, and the offset in the payload at its end."""
    first, began = 0, 0
    stops = [*meta.offsets()[1:], meta.payload_bytes] if meta.chunks else []
    for index, stop in enumerate(stops):
        if stop - began >= PORTION_BYTES or index + 1 == len(stops):
            yield first, index + 1, stop
            first, began = index + 1, stop


class SnapshotTaker:
    """Copies the state into the two slots in turn, and sends each snapshot to the partner."""

    def __init__(
        self, folder: Path, meta: SnapshotMeta, part: dict[StateChunk, torch.Tensor], sender: Sender | None
    ) -> None:
        """Make the slots.

        Args:
            folder: the task's, on this node.
            meta: what all snapshots of this rank in this generation have in common.
            part: the tensors that are copied, as flat views.
            sender: the connection to the partner; None: no snapshot is sent.

        Raises:
            OSError: there is no room in shared memory.
        """
        self._meta, self._sources = meta, list(part.values())
        self._slots = [Slot(folder / files.name(meta.generation, meta.rank, n), meta) for n in (0, 1)]
        self._sender = sender
        self._kept_by_partner = True
        self._next = 0
        cuda = any(source.is_cuda for source in self._sources)
        self._stream: Any = torch.cuda.Stream(priority=LOWEST) if cuda else None  # type: ignore[no-untyped-call]
        memories = [torch.frombuffer(slot.payload, dtype=torch.uint8) for slot in self._slots]
        self._pinned = [memory for memory in memories if cuda and device.pin(memory)]
        self._targets = [self._views(memory) for memory in memories]
        self._portions = list(portions(meta))

    def _views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        return [
            memory[begin : begin + size].view(source.dtype)
            for begin, (_, size), source in zip(self._meta.offsets(), self._meta.chunks, self._sources, strict=True)
        ]

    @property
    def is_lost(self) -> bool:
        """Whether a file of this rank's is gone from its folder, not of the step that was stored, or unreadable."""
        return any(slot.is_lost for slot in self._slots)

    @property
    def is_kept_by_partner(self) -> bool:
        """Whether the partner, if there is one, has stored the newest snapshot."""
        return self._kept_by_partner

    def switch(self) -> None:
        """Use the other slot next: all ranks have stored their snapshots."""
        self._next ^= 1

    def replace_sources(self, part: dict[StateChunk, torch.Tensor]) -> None:
        """Copy from other tensors from now on, which contain the same chunks.

        Raises:
            RuntimeError: they contain other chunks.
        """
        if tuple((tuple(chunk), chunk.bytes) for chunk in part) != self._meta.chunks:
            raise RuntimeError("the optimizer's state has changed its form")
        self._sources = list(part.values())

    def ready(self) -> Any:
        """Return the event that the copying has to wait for on the device, if there is one."""
        return torch.cuda.current_stream().record_event() if self._stream is not None else None

    def copy(self, ready: Any) -> None:
        """Copy the state; nothing may change it meanwhile. ``ready``: the result of ``ready``."""
        slot, targets = self._slots[self._next], self._targets[self._next]
        slot.begin()
        # Few calls, of many tensors each: the interpreter's lock changes hands with every call.
        if self._stream is None:
            for first, last, stop in self._portions:
                torch._foreach_copy_(targets[first:last], self._sources[first:last])
                slot.written(stop)
        else:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                torch._foreach_copy_(targets, self._sources, non_blocking=True)
            self._stream.synchronize()

    def store(self, copied: Future[None], step: int, digest: bytes) -> None:
        """Seal the snapshot and send it to the partner.

        Args:
            copied: the result of ``copy``; if it failed, this fails too.
            step: updates applied to the state.
            digest: the digest of the samples of those updates.
        """
        copied.result()
        slot = self._slots[self._next]
        slot.seal(step, digest)
        if self._sender is not None:
            self._kept_by_partner = self._sender.send(slot.path.name, slot.content)

    def close(self) -> None:
        """Close the connection to the partner; a ``store`` in progress fails."""
        if self._sender is not None:
            self._sender.close()

    def release(self) -> None:
        """Release the memory, once nothing is in progress, and delete the files without a whole snapshot."""
        for memory in self._pinned:
            device.unpin(memory)
        self._pinned = []
        for slot in self._slots:
            if not slot.is_whole:
                slot.path.unlink(missing_ok=True)
