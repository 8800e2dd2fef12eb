"""Persistent checkpoints: copied at a step boundary, written beside training, complete or absent.

``Writer.begin`` plans and copies (all ranks, milliseconds); a thread of each rank then writes that rank's part. When
the end-of-step agreement has told that every part is written, rank 0's thread publishes the checkpoint. Nothing in
between waits for a peer. What a fault leaves unfinished the next generation deletes. A Megatron model's checkpoint can
be read in another layout.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron import archive, device
from unicron.archive import Manifest
from unicron.errors import DamagedCheckpoint
from unicron.loading import loading
from unicron.model import checkpoint_metadata, sharded_parameters
from unicron.pieces import is_megatron
from unicron.replica import Replica

PLAIN_FILE = "state.pt"
"""What the checkpoint of a model that is not Megatron's holds: one file, written by rank 0."""

WRITTEN, WRITING, FAILED = 0, 1, 2
"""A rank's part of the checkpoint in hand (``WRITTEN`` also if there is none); the worst of all ranks counts."""

FORMAT = ("torch_dist", 1)
"""Megatron's name and version of the folder's format."""


def _state(replica: Replica, *, loading: bool) -> dict[str, Any]:
    metadata = checkpoint_metadata()
    model = replica.model.module.sharded_state_dict(metadata=metadata)
    optimizer = replica.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


Results = list[Any]
"""What Megatron's writer tells of the tensors that one rank wrote: where each is."""


@dataclass(slots=True)
class _Part:
    """One rank's part of one checkpoint."""

    path: Path
    step: int
    digest: str
    write: Callable[[], tuple[Results, list[str]]]
    """Writes the part's files; returns what they hold, and their names."""
    finish: Callable[[list[Results]], list[str]]
    """On rank 0: writes what describes all parts; returns the names of the files."""
    written: Future[None] | None = None


class _Strategies:
    """Megatron's saving of a sharded state, split where it would wait for peers.

    Kept for a generation: what the ranks have planned once they need not plan again.
    """

    def __init__(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        planned = self
        # It warns of "old" files in the folder: those of ranks that are faster, as no rank waits for another here.
        logging.getLogger("megatron.core.dist_checkpointing.serialization").setLevel(logging.ERROR)

        class Split(TorchDistSaveShardedStrategy):  # type: ignore[misc]
            def _get_save_and_finalize_callbacks(self, writer: Any, saved: Any) -> Any:
                planned.writer, planned.metadata = writer, saved[1]
                return super()._get_save_and_finalize_callbacks(writer, saved)

        self.writer: Any = None
        self.metadata: Any = None
        # Each data-parallel replica writes its share of the shard that all of them hold.
        self._strategy = FullyParallelSaveStrategyWrapper(
            Split(*FORMAT, cached_metadata=True), parallel_state.get_data_parallel_group(), do_cache_distribution=True
        )
        self._checked = False

    def part(self, replica: Replica, position: dict[str, Any], path: Path) -> _Part:
        """Plan and copy; all ranks call it."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        folder = archive.torso(path)
        request = dist_checkpointing.save(
            _state(replica, loading=False) | position,
            str(folder),
            sharded_strategy=self._strategy,
            validate_access_integrity=not self._checked,
            async_sharded_save=True,
        )
        self._checked = True
        writer, metadata = self.writer, self.metadata
        function, arguments = request.async_fn, list(request.async_fn_args)
        if function is not None:
            arguments[1] = _copied(arguments[1])
        names = [name for _, name, _ in arguments[1]] if function is not None else []
        if dist.get_rank() == 0:
            names.append("common.pt")  # written by now

        def write() -> tuple[Results, list[str]]:
            if function is not None:
                function(*arguments)
            results = writer.retrieve_write_results()
            if isinstance(results, tuple):  # torch's wrapped exception
                raise results[0]
            return results, names

        def finish(parts: list[Results]) -> list[str]:
            writer.finish(metadata, parts)
            save_config(CheckpointingConfig(*FORMAT), str(folder))
            return [".metadata", "metadata.json"]

        return _Part(path, position["step"], position["digest"], write, finish)


def _copied(buckets: Sequence[Any]) -> list[Any]:
    """Return what a writer is to write, copied to memory of its own: training goes on in the original."""
    return [
        (path, name, (plain, [(item, tensor.to("cpu", copy=True)) for item, tensor in tensors]))
        for path, name, (plain, tensors) in buckets
    ]


def _plain_part(replica: Replica, position: dict[str, Any], path: Path) -> _Part:
    """Copy the state of a model that every rank holds whole: rank 0's is written."""
    folder = archive.torso(path)
    state = {"model": replica.model.state_dict(), "optimizer": replica.optimizer.state_dict()}
    state = copy.deepcopy(state) if dist.get_rank() == 0 else {}

    def write() -> tuple[Results, list[str]]:
        if not state:
            return [], []
        with open(folder / PLAIN_FILE, "wb") as file:
            torch.save(state | position, file)
            file.flush()
            os.fsync(file.fileno())
        return [], [PLAIN_FILE]

    return _Part(path, position["step"], position["digest"], write, lambda parts: [])


class Writer:
    """Writes this rank's part of checkpoints in a thread; on rank 0, publishes those that all ranks have written."""

    def __init__(self, keep: int) -> None:
        """Args: keep: how many published checkpoints of the task to leave."""
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unicron-checkpoint")
        self._strategies: _Strategies | None = None
        self._part: _Part | None = None
        self._publication: Future[None] | None = None
        self._protected: list[Path] = []

    @property
    def status(self) -> int:
        """This rank's part: ``WRITTEN``, ``WRITING`` or ``FAILED``."""
        part = self._part
        if part is None or part.written is None:
            return WRITTEN
        if not part.written.done():
            return WRITING
        return WRITTEN if part.written.exception() is None else FAILED

    @property
    def idle(self) -> bool:
        """Whether no checkpoint is in hand: the same on all ranks."""
        return self._part is None

    def enter(self, path: Path, generation: int, protected: str) -> None:
        """Enter a generation: what an older one was writing is given up.

        Args:
            path: where a checkpoint of the new generation would be.
            generation: its number.
            protected: the checkpoint it started from, if any.
        """
        self._part, self._strategies = None, None
        self._protected = [Path(protected)] if protected else []
        if dist.get_rank() == 0:
            self._thread.submit(archive.clean, path, generation)

    def begin(self, replica: Replica, path: Path) -> None:
        """Copy the state and begin to write it; all ranks call it.

        Raises:
            RuntimeError: a collective failed; the folder will not exist.
        """
        archive.torso(path).mkdir(parents=True, exist_ok=True)
        position = {"step": replica.applied, "digest": replica.digest.hex()}
        if is_megatron(replica.model):
            self._strategies = self._strategies or _Strategies()
            part = self._strategies.part(replica, position, path)
        else:
            part = _plain_part(replica, position, path)
        part.written = self._thread.submit(_write_part, part, dist.get_rank())
        self._part = part

    def agreed(self, status: int, published: Callable[[int, Path], None]) -> Future[None] | None:
        """Take what all ranks know of the checkpoint in hand: the worst status of any.

        Args:
            status: that status.
            published: called with step and path, on rank 0's thread, once the checkpoint is published.

        Returns:
            The publication under way, on rank 0.
        """
        part = self._part
        if part is None or status == WRITING:
            return None
        self._part = None
        if status == FAILED:
            cause = part.written.exception() if part.written is not None and part.written.done() else None
            print(f"unicron: checkpoint {part.path} is given up: {cause or 'a peer failed'}", file=sys.stderr)
            self._thread.submit(shutil.rmtree, archive.torso(part.path), ignore_errors=True)
            return None
        if dist.get_rank() != 0:
            return None
        self._publication = self._thread.submit(self._publish, part, dist.get_world_size(), published)
        return self._publication

    def complete(self, published: Callable[[int, Path], None]) -> bool:
        """Wait until the checkpoint in hand is published, if there is one; all ranks call it.

        Returns:
            Whether it was (True also if there is none): the same on all ranks.

        Raises:
            RuntimeError: a collective failed.
        """
        if self._publication is not None:
            self._publication.exception()  # waits: this may be the end of the process
        if self._part is None:
            return True
        assert self._part.written is not None
        self._part.written.exception()  # waits
        worst = torch.tensor(self.status, device=device.current())
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        publication = self.agreed(int(worst), published)
        failed = int(worst) != WRITTEN
        if publication is not None:
            failed = publication.exception() is not None  # waits
        verdict = torch.tensor(int(failed), device=device.current())
        dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
        return int(verdict) == 0

    def _publish(self, part: _Part, world_size: int, published: Callable[[int, Path], None]) -> None:
        folder = archive.torso(part.path)
        try:
            results: list[Results] = []
            files: dict[str, tuple[int, str]] = {}
            for rank in range(world_size):
                record = folder / _record(rank)
                rank_results, rank_files = pickle.loads(record.read_bytes())
                results.append(rank_results)
                files |= rank_files
                record.unlink()
            files |= {name: archive.checksum(folder / name) for name in part.finish(results)}
            archive.publish(part.path, Manifest(step=part.step, digest=part.digest, files=files))
        except Exception as err:
            print(f"unicron: checkpoint {part.path} is given up: {type(err).__name__}: {err}", file=sys.stderr)
            raise
        published(part.step, part.path)
        archive.retire(part.path, self._keep, [*self._protected, part.path])


def _record(rank: int) -> str:
    return f".part-{rank}"


def _write_part(part: _Part, rank: int) -> None:
    """Write a rank's files and then what rank 0 needs to know of them."""
    folder = archive.torso(part.path)
    results, names = part.write()
    files = {name: archive.checksum(folder / name) for name in names}
    record = folder / _record(rank)
    with open(record, "wb") as file:
        pickle.dump((results, files), file)
        file.flush()
        os.fsync(file.fileno())


# Reading.


def candidates(named: Path) -> list[Path]:
    """Return the checkpoints to try: the named one, then its task's others, the newest first; all ranks call it."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        others = archive.published(named)
        found = [[str(named), *(str(p) for p in others if p.resolve() != named.resolve())]]
    dist.broadcast_object_list(found, src=0)
    return [Path(p) for p in found[0]]


def newest_step(named: Path) -> int:
    """Return the step of the checkpoint that ``restore`` tries first; 0 if there is none."""
    for path in [named, *archive.published(named)]:
        with contextlib.suppress(DamagedCheckpoint):
            return archive.read(path).step
    return 0


def restore(replica: Replica, named: Path) -> Path:
    """Read the named checkpoint or, if it is damaged, the newest other one; all ranks call it.

    Returns:
        The one that was read.

    Raises:
        DamagedCheckpoint: there is none that is whole.
    """
    for path in candidates(named):
        if intact(path):
            load(replica, path)
            return path
    raise DamagedCheckpoint(f"{named} is damaged, and there is no other")


def intact(path: Path) -> bool:
    """Check a checkpoint against its checksums, each rank its share of the files; all ranks call it."""
    reason = ""
    try:
        archive.verify(path, dist.get_rank(), dist.get_world_size())
    except DamagedCheckpoint as err:
        reason = str(err)
        print(f"unicron: warning: {reason}; trying another", file=sys.stderr, flush=True)
    damaged = torch.tensor(int(bool(reason)), device=device.current())
    dist.all_reduce(damaged, op=dist.ReduceOp.MAX)
    return int(damaged) == 0


def load(replica: Replica, path: Path) -> None:
    """Read a checkpoint, in whatever layout it was written; all ranks call it.

    Raises:
        OSError, RuntimeError: it cannot be read.
    """
    from megatron.core import dist_checkpointing

    if is_megatron(replica.model):
        with loading(replica):
            state = dist_checkpointing.load(_state(replica, loading=True), str(path))
            replica.model.module.load_state_dict(state["model"])
            replica.optimizer.load_state_dict(state["optimizer"])
    else:
        state = torch.load(path / PLAIN_FILE, map_location="cpu")
        replica.model.load_state_dict(state["model"])
        replica.optimizer.load_state_dict(state["optimizer"])
    replica.hold(int(state["step"]), bytes.fromhex(state["digest"]))


def gather(replica: Replica) -> dict[str, torch.Tensor]:
    """Return the full, unsharded parameters on rank 0 (nothing on the others); all ranks call it."""
    pieces = [
        (name, tuple(shard.global_shape), tuple(shard.global_offset), tuple(shard.local_shape), shard.data.cpu())
        for name, shard in sharded_parameters(replica.model).items()
        if shard.replica_id == 0 or not any(shard.replica_id)
    ]
    gathered: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(pieces, gathered if dist.get_rank() == 0 else None, dst=0)
    full: dict[str, torch.Tensor] = {}
    for rank_pieces in gathered:
        for name, shape, offset, size, data in rank_pieces:
            tensor = full.setdefault(name, torch.zeros(shape, dtype=data.dtype))
            view = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
            tensor[view] = data.reshape(size)
    return full


def export(replica: Replica, path: Path) -> None:
    """Write the full, unsharded parameters as a safetensors file; all ranks call it, rank 0 writes."""
    from safetensors.torch import save_file

    full = gather(replica) if is_megatron(replica.model) else replica.model.state_dict()
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        save_file({k: v.contiguous() for k, v in full.items()}, str(partial))
        os.replace(partial, path)
