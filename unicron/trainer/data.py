"""Samples of the built-in trainer, from a Megatron indexed dataset or from a text file that is made into one.

A sample id is an index of megatron-core's ``GPTDataset``. Step ``s`` (from 1) has the ``s``-th block of
``global_batch`` consecutive ids, and micro-batch ``k`` (from 0) has the ``k``-th block of ``micro_batch`` ids of its
step. So the samples depend neither on the layout nor on the rank that computes them.

Megatron-core draws the order of samples from their number, so the number of the task's first start counts for its life,
whatever becomes of its steps. Behind what was drawn then, epochs are appended, each in the order of a
permutation that is computed for one index at a time (a Feistel network on the least even number of bits, walked until
the result is in range: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It takes neither memory nor
time in advance, whatever the size of the data: a rank that enters a new epoch in the midst of training does not stop.

What processes of a task make once for all others is whole and on the disk under its name, or not there at all. A
process may be killed at any time, and other processes, or its successor, read what it has left. So each set of files is
made beside its place and renamed when all of it has reached the disk. What a killed process left beside the place is
removed by the next one on the same machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pickle
import shutil
import socket
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unicron.checkpoint import storage
from unicron.errors import InvalidSpec
from unicron.trainer.spec import Spec

END_OF_DOCUMENT = 256
"""Token at the end of each document of a byte-level text: the first value that is not a byte's."""

TEXT = "text"
"""The prefix of the files of a tokenised text, in a folder of their own."""


ROUNDS = 6
"""Number of rounds of the network. Four make it indistinguishable from a random permutation (Luby and Rackoff, 1988);
two more are added, since an epoch of few samples has rounds of few bits."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, made if missing, against the other processes of this machine that call this function."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_folder(folder: Path, make: Callable[[Path], object]) -> None:
    """Make a folder of files, under the lock of ``locked``.

    Where machines share the folder's parent without a common lock, each makes its own, and the first one stays.

    Args:
        folder: its path; nothing is there.
        make: writes the files into the empty folder that it is given.

    Raises:
        OSError: the files cannot be written.
    """
    beside = folder.with_name(f".{folder.name}.{socket.gethostname()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        make(beside)
        for path in (*beside.iterdir(), beside):
            storage.sync(path)
        with contextlib.suppress(FileExistsError):
            _rename(beside, folder)
        storage.sync(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _rename(source: Path, target: Path) -> None:
    """Rename a folder. ``FileExistsError``: there is a folder of that name with files in it."""
    try:
        source.rename(target)
    except OSError:
        if target.is_dir():
            raise FileExistsError(target) from None
        raise


def permuted(index: int, size: int, seed: int, epoch: int) -> int:
    """Return the sample at a place of an epoch.

    Args:
        index: the place, from 0.
        size: samples in the epoch; more than ``index``.
        seed: the task's.
        epoch: its number among those that are appended, from 0.
    """
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    while True:
        left, right = index >> bits, index & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mixed(seed, epoch, number, right) & mask)
        index = left << bits | right
        if index < size:
            return index


def _mixed(*numbers: int) -> int:
    """Return 64 bits that depend on all of the numbers."""
    content = b"".join(number.to_bytes(8, "little") for number in numbers)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


class ByteTokenizer:
    """The part of a tokenizer's interface that megatron-core's dataset configuration needs."""

    def __init__(self, vocabulary: int) -> None:
        """Describe the tokens.

        Args:
            vocabulary: number of tokens; the last one ends a document.
        """
        self.vocab_size = vocabulary
        self.eod = vocabulary - 1
        self.unique_identifiers = {"class": type(self).__name__, "vocabulary": vocabulary}


UNREADABLE = (OSError, ValueError, EOFError, pickle.UnpicklingError)
"""Errors that ``numpy.load`` raises for a file that is cut or overwritten."""


def tokenise(text: Path, prefix: Path) -> None:
    """Write the bytes of a text file as an indexed dataset, one document for each block between blank lines.

    Args:
        text: the text file.
        prefix: the prefix of the dataset's files, ``<prefix>.bin`` and ``<prefix>.idx``.

    Raises:
        InvalidSpec: the file contains no text.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    documents = [document for document in text.read_bytes().split(b"\n\n") if document.strip()]
    if not documents:
        raise InvalidSpec(f"data: {text} contains no text")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        tokens = np.append(np.frombuffer(document, dtype=np.uint8).astype(np.uint16), np.uint16(END_OF_DOCUMENT))
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def dataset_prefix(data: str, cache: Path) -> Path:
    """Return the prefix of the indexed dataset for ``data``.

    Args:
        data: an indexed dataset's prefix or file, or a text file, which is tokenised the first time.
        cache: folder of tokenised text.

    Raises:
        InvalidSpec: ``data`` is neither an indexed dataset's prefix nor a readable file.
    """
    given = Path(data)
    prefix = given.with_suffix("") if given.suffix in (".bin", ".idx") else given
    if Path(f"{prefix}.idx").is_file() and Path(f"{prefix}.bin").is_file():
        return prefix
    if not given.is_file():
        raise InvalidSpec(f"data: {data} is neither an indexed dataset (.bin and .idx) nor a file")
    folder = cache / f"bytes-{_digest(_version(given))}"
    with locked(cache):
        if not folder.is_dir():
            make_folder(folder, lambda beside: tokenise(given, beside / TEXT))
    return folder / TEXT


def _version(path: Path) -> str:
    """Return a text that tells a file from others, and from itself once it has been changed."""
    stat = path.stat()
    return f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


class Samples:
    """The samples of a task, in an order that is fixed for the task's life."""

    def __init__(self, spec: Spec, cache: Path, *, recorded: int = 0) -> None:
        """Open the dataset.

        Args:
            spec: the task.
            cache: folder of tokenised text and of the indices that megatron-core builds.
            recorded: the number of samples from which the order was drawn, by the checkpoint from which the run goes
                on; 0: there is none, or it does not say.

        Raises:
            InvalidSpec: the data cannot be read, has tokens beyond the vocabulary or has too few samples; or the
                specification names another order than the checkpoint.
        """
        self._spec = spec
        if recorded and spec.order_samples not in (0, recorded):
            raise InvalidSpec(
                f"order_samples: {spec.order_samples}; the checkpoint's order was drawn from {recorded} samples"
            )
        self.drawn = recorded or spec.order
        """The number of samples from which the order was drawn."""
        prefix = dataset_prefix(spec.data, cache)
        if prefix.name == TEXT and prefix.parent.parent == cache and spec.vocabulary <= END_OF_DOCUMENT:
            raise InvalidSpec(f"model.vocabulary: {spec.vocabulary}; byte-level text needs {END_OF_DOCUMENT + 1}")
        with locked(cache):
            self._first = _opened(spec, prefix, self.drawn, cache)
            more = len(self._first) < spec.steps * spec.global_batch
            self._epoch: Any = _opened(spec, prefix, 1, cache) if more else None

    def ids(self, step: int, micro_batch: int) -> list[int]:
        """Return the sample ids of one micro-batch (counted from 0) of a step (counted from 1)."""
        first = (step - 1) * self._spec.global_batch + micro_batch * self._spec.micro_batch
        return list(range(first, first + self._spec.micro_batch))

    def batch(self, ids: list[int]) -> dict[str, torch.Tensor]:
        """Return ``tokens``, ``labels``, ``loss_mask``, ``position_ids`` of samples, of shape (samples, sequence)."""
        rows = [self._sample(i) for i in ids]
        return {k: torch.stack([row[k] for row in rows]) for k in ("tokens", "labels", "loss_mask", "position_ids")}

    def _sample(self, sample_id: int) -> Any:
        """Return a sample: of those drawn at the first start or, behind these, of an epoch that is appended."""
        beyond = sample_id - len(self._first)
        if beyond < 0:
            return self._first[sample_id]
        number, index = divmod(beyond, len(self._epoch))
        return self._epoch[permuted(index, len(self._epoch), self._spec.seed, number)]


def _opened(spec: Spec, prefix: Path, count: int, cache: Path) -> Any:
    """Return megatron-core's dataset of a number of samples; the folder ``cache`` is locked.

    Megatron-core writes its index files in place, and reads what lies there. So they are made in a folder of their own
    for each order, and what cannot be read any more is made anew.

    Raises:
        InvalidSpec: there are too few samples.
        OSError: the index files cannot be written.
    """
    data = _version(Path(f"{prefix}.idx"))
    order = _digest(data, spec.seed, spec.sequence_length, spec.vocabulary, count, version("megatron-core"))
    folder = cache / "indices" / order
    found = None
    if folder.is_dir():
        try:
            found = _dataset(spec, prefix, count, folder)
        except UNREADABLE:
            shutil.rmtree(folder)
    if found is None:
        make_folder(folder, lambda beside: _dataset(spec, prefix, count, beside))
        found = _dataset(spec, prefix, count, folder)
    if len(found) < count:
        raise InvalidSpec(f"data: {spec.data} gives {len(found)} samples of the {count} needed")
    return found


def _dataset(spec: Spec, prefix: Path, count: int, folder: Path) -> Any:
    """Return megatron-core's dataset of a number of samples; its index is read from a folder, or made there."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=spec.seed,
        sequence_length=spec.sequence_length,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(folder),
        tokenizer=ByteTokenizer(spec.vocabulary),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    indexed = GPTDataset.build_low_level_dataset(str(prefix), config)
    documents = np.arange(GPTDataset.numel_low_level_dataset(indexed), dtype=np.int32)
    return GPTDataset(indexed, str(prefix), documents, count, Split.train, config)
