"""The export of a task's result: the full, unsharded parameters in the format safetensors.

A small model is one file, ``parameters.safetensors``. A larger one is several, of whole tensors, with an index that
says which tensor is in which file (``parameters.safetensors.index.json``): the form in which Hugging Face's libraries
share and load large models (https://huggingface.co/docs/transformers/big_models#sharded-checkpoints).

No rank gathers the model. Each file has one rank that writes it, portion by portion: what other ranks have of a portion
travels to it as state does (``unicron.state.transfer``), from the nearest rank that has it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from unicron import device
from unicron.checkpoint import parts, storage, target
from unicron.checkpoint.writer import PROGRESS_S
from unicron.errors import UnicronError
from unicron.link.waiting import Wait
from unicron.state import transfer
from unicron.state.chunks import StateChunk, dtype_of, undivided
from unicron.state.tensors import parameter_chunks
from unicron.state.transfer import AgreedState
from unicron.state.transfer_plan import Transfer, TransferPlan, plan_transfers

NAME = "parameters"
"""Beginning of the files' names, before the part that tells them apart."""

SUFFIX = ".safetensors"

INDEX = f"{NAME}{SUFFIX}.index.json"
"""The file that says which tensor is in which file, if there are several."""

PORTION_BYTES = 256 << 20
"""Bytes of parameters that a rank collects before it writes them; a larger tensor is collected alone. That is little
beside a model, and a second's work for a slow storage."""

FILE_BYTES = 4 << 30
"""Size at which a further file begins. Chosen: near the 5 GB with which Hugging Face's libraries have long divided
models; several ranks write a model of 70 billion parameters at once."""

_DONE, _FAILED, _DOING = 0, 1, 2
"""The outcome of what all ranks' threads do; the largest number counts."""


class ExportFile(NamedTuple):
    """One file of an export."""

    name: str
    rank: int
    """The rank that writes the file."""
    tensors: list[StateChunk]
    """The whole tensors of the file, in their order in it."""


class Exported(NamedTuple):
    """The outcome of an export, the same on all ranks."""

    path: Path
    """The file with all parameters, or the index of several files."""
    reason: str
    """Why the export could not be written; empty: it is written, durably."""


def plan_files(tensors: Iterable[StateChunk], writers: Sequence[int], limit_bytes: int) -> list[ExportFile]:
    """Return the files of an export. Pure.

    Args:
        tensors: whole tensors; each name occurs once.
        writers: the ranks that may write, which take turns; the first one writes a single file.
        limit_bytes: size at which a further file begins.
    """
    # Larger numbers come first, as the format's library has it: it reads no number that is not aligned.
    ordered = sorted(tensors, key=lambda one: (-dtype_of(one.dtype).itemsize, one.key))
    groups = _grouped(ordered, limit_bytes) or [[]]
    return [
        ExportFile(_file_name(number, len(groups)), writers[number % len(writers)], group)
        for number, group in enumerate(groups)
    ]


def index_of(files: Iterable[ExportFile]) -> dict[str, Any]:
    """Return the index of an export of several files. Pure."""
    located = {one.key: (file.name, one.bytes) for file in files for one in file.tensors}
    return {
        "metadata": {"total_size": sum(size for _, size in located.values())},
        "weight_map": {key: name for key, (name, _) in sorted(located.items())},
    }


def _file_name(number: int, of: int) -> str:
    return f"{NAME}{SUFFIX}" if of == 1 else f"{NAME}-{number + 1:05d}-of-{of:05d}{SUFFIX}"


def _grouped(tensors: Iterable[StateChunk], limit_bytes: int) -> list[list[StateChunk]]:
    """Return tensors in groups of at most a number of bytes, or of a single tensor that is larger."""
    groups: list[list[StateChunk]] = []
    size = 0
    for one in tensors:
        if not groups or size + one.bytes > limit_bytes:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += one.bytes
    return groups


def export(
    model: Any,
    folder: Path,
    thread: ThreadPoolExecutor,
    *,
    beside: Mapping[str, bytes] | None = None,
    nodes: Sequence[str] = (),
    wait: Wait = lambda work: work.wait(),
    progress: Callable[[], None] = lambda: None,
) -> Exported:
    """Write the full parameters to a folder; all ranks call it.

    The files lie aside until all of them are durable: none is there in part, and files that could not be written are
    deleted. Other threads run meanwhile, however long it takes.

    Args:
        model: the rank's.
        folder: the same on all ranks; ranks that do not see what rank 0 writes there write nothing.
        thread: an executor with one thread, which writes.
        beside: name -> content of small files that rank 0 writes behind the parameters.
        nodes: each rank's node; empty: all ranks are on one.
        wait: waits for a collective.
        progress: called once in a while.

    Raises:
        RuntimeError: a collective failed.
        UnicronError: the format has no such type of numbers, or no rank has some part of a parameter.
    """
    mine = list(parameter_chunks(model).items())
    has = transfer.gather([chunk for chunk, _ in mine], wait)
    tensors = {one.key: undivided(one.key, one.global_shape, one.dtype) for chunks in has for one in chunks}
    for one in tensors.values():
        parts.check_type(one.key, one.dtype)
    writers = [0]
    if sum(one.bytes for one in tensors.values()) > FILE_BYTES:
        sees, problem = target.seeing(f"{folder}/.seen", wait)
        if problem:
            return Exported(folder / INDEX, problem)
        writers = [rank for rank, seen in enumerate(sees) if seen]
    files = plan_files(tensors.values(), writers, FILE_BYTES)
    required = [[one for file in files if file.rank == rank for one in file.tensors] for rank in range(len(has))]
    transfers = plan_transfers(required, [[(chunk, 0) for chunk in chunks] for chunks in has], 0, nodes)
    if transfers is None:
        raise UnicronError("the result cannot be written: no rank has some part of a parameter")
    exporting = _Export(folder, files, thread, wait, progress)
    return exporting.write(TransferPlan(0, required, transfers), mine, beside or {})


class _Export:
    """One export in progress, on one rank."""

    def __init__(
        self,
        folder: Path,
        files: Sequence[ExportFile],
        thread: ThreadPoolExecutor,
        wait: Wait,
        progress: Callable[[], None],
    ) -> None:
        self._folder, self._files = folder, files
        self._thread, self._wait, self._progress = thread, wait, progress
        self._own = [_Partial(folder / file.name, file.tensors) for file in files if file.rank == dist.get_rank()]
        self._error: BaseException | None = None

    def write(
        self, plan: TransferPlan, mine: Sequence[tuple[StateChunk, torch.Tensor]], beside: Mapping[str, bytes]
    ) -> Exported:
        """Write all files; all ranks call it.

        Args:
            plan: how the tensors of each rank's files get there.
            mine: what this rank has, in the plan's numbering.
            beside: name -> content of small files that rank 0 writes behind the parameters.
        """
        path, small = self._folder / self._files[0].name, dict(beside)
        if len(self._files) > 1:
            path, small = self._folder / INDEX, {INDEX: json.dumps(index_of(self._files), indent=1).encode()} | small
        try:
            if self._write_portions(plan, mine) and self._all_do(self._publish):
                self._all_do(partial(self._write_small, small))
        finally:
            self._thread.submit(self._give_up)
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error
        text = f"{type(self._error).__name__}: {self._error}" if self._error is not None else ""
        reasons = transfer.gather(text, self._wait)
        return Exported(path, next((reason for reason in reasons if reason), ""))

    def _write_portions(self, plan: TransferPlan, mine: Sequence[tuple[StateChunk, torch.Tensor]]) -> bool:
        """Write all tensors aside, in as many rounds as any rank has portions; return whether all are written."""
        portions = [_grouped(required, PORTION_BYTES) for required in plan.required]
        due = [[number for number, portion in enumerate(listed) for _ in portion] for listed in portions]
        by_round: dict[int, list[Transfer]] = {}
        for one in plan.transfers:
            by_round.setdefault(due[one.receiver][one.required], []).append(one)
        own = portions[dist.get_rank()]
        for number in range(max(map(len, portions))):
            portion = own[number] if number < len(own) else []
            values = {one: torch.empty(one.shape, dtype=dtype_of(one.dtype)) for one in portion}
            of_round = plan._replace(transfers=by_round.get(number, []))
            given = AgreedState(0, b"", of_round, list(mine))
            transfer.execute(given, values, self._wait, lambda _: self._progress())
            if not self._all_do(partial(self._append, list(values.values()))):
                return False
        return True

    def _all_do(self, action: Callable[[], None]) -> bool:
        """Have each rank's thread do something, and wait for all; return whether all could do it."""
        doing = self._thread.submit(action)
        while True:
            futures.wait([doing], timeout=PROGRESS_S)
            if doing.done():
                self._error = doing.exception()
            mine = _DOING if not doing.done() else _FAILED if self._error is not None else _DONE
            status = torch.tensor(mine, device=device.current())
            self._wait(dist.all_reduce(status, op=dist.ReduceOp.MAX, async_op=True))
            if int(status) != _DOING:
                return int(status) == _DONE
            self._progress()

    def _append(self, values: Iterable[torch.Tensor]) -> None:
        for tensor in values:
            next(file for file in self._own if file.left).append(tensor)

    def _publish(self) -> None:
        for file in self._own:
            file.publish()

    def _write_small(self, files: Mapping[str, bytes]) -> None:
        """Write the files that describe the parameters."""
        if dist.get_rank() == 0:
            for name, content in files.items():
                storage.write_whole(str(self._folder / name), content)

    def _give_up(self) -> None:
        for file in self._own:
            file.give_up()


class _Partial:
    """A file that is written aside, tensor by tensor."""

    def __init__(self, path: Path, tensors: Sequence[StateChunk]) -> None:
        self._path, self._aside, self._tensors = path, path.with_name(f"{path.name}.partial"), tensors
        self._file: IO[bytes] | None = None
        self.left = len(tensors)
        """Tensors that are not yet written."""

    def append(self, tensor: torch.Tensor) -> None:
        """Write the next tensor.

        Raises:
            OSError: it cannot be written.
        """
        parts.write_values(self._opened(), tensor)
        self.left -= 1

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._aside.open("wb")
            parts.write_header(self._file, {one.key: (one.dtype, one.shape) for one in self._tensors})
        return self._file

    def publish(self) -> None:
        """Give the file, which is complete, its name; it survives a power cut once this returns.

        Raises:
            OSError: it cannot be done.
        """
        file = self._opened()
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(self._aside, self._path)
        storage.sync(self._path.parent)

    def give_up(self) -> None:
        """Delete what is not published: on a full disk others need the room."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._aside.unlink(missing_ok=True)
