"""Training samples: a Megatron indexed dataset, or a text file turned into one.

Sample ids of step ``s`` (from 1) are the ``s``-th block of ``global_batch`` consecutive indices of megatron-core's
GPTDataset, and micro-batch ``k`` is the ``k``-th block of ``micro_batch`` of them: the same samples whatever the
layout and whoever computes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unicron.errors import InvalidSpec
from unicron.spec import Spec

END_OF_DOCUMENT = 256
"""Token after each document of a byte-level text: the first value that no byte has."""


class ByteTokenizer:
    """The little of a tokenizer that megatron-core's dataset configuration asks for."""

    def __init__(self, vocabulary: int) -> None:
        """Args: vocabulary: number of tokens; the last one ends a document."""
        self.vocab_size = vocabulary
        self.eod = vocabulary - 1
        self.unique_identifiers = {"class": type(self).__name__, "vocabulary": vocabulary}


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder (made if missing) among the processes of this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def tokenise(text: Path, prefix: Path) -> None:
    """Write ``prefix``.bin and .idx: the bytes of a text file, one document for each block between blank lines.

    Written under temporary names and renamed, the index last, so that a reader sees all or nothing.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    documents = [document for document in text.read_bytes().split(b"\n\n") if document.strip()]
    if not documents:
        raise InvalidSpec(f"data: {text} holds no text")
    partial = f".{os.getpid()}.tmp"
    builder = IndexedDatasetBuilder(str(bin_path) + partial, dtype=np.uint16)
    for document in documents:
        tokens = np.append(np.frombuffer(document, dtype=np.uint8).astype(np.uint16), np.uint16(END_OF_DOCUMENT))
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(str(idx_path) + partial)
    os.replace(str(bin_path) + partial, bin_path)
    os.replace(str(idx_path) + partial, idx_path)


def dataset_prefix(data: str, cache: Path) -> Path:
    """Return the indexed dataset's prefix for ``data``: as it is, or tokenised into ``cache`` (once).

    Raises:
        InvalidSpec: ``data`` is neither an indexed dataset's prefix nor a readable file.
    """
    given = Path(data)
    prefix = given.with_suffix("") if given.suffix in (".bin", ".idx") else given
    if Path(f"{prefix}.idx").is_file() and Path(f"{prefix}.bin").is_file():
        return prefix
    if not given.is_file():
        raise InvalidSpec(f"data: {data} is neither an indexed dataset (.bin and .idx) nor a file")
    stat = given.stat()
    identity = f"{given.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    target = cache / f"bytes-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    with locked(cache):
        if not Path(f"{target}.idx").is_file():
            tokenise(given, target)
    return target


class Samples:
    """The samples of a task in their fixed order."""

    def __init__(self, spec: Spec, cache: Path) -> None:
        """Open the dataset; indices that megatron-core builds are kept in ``cache``.

        Raises:
            InvalidSpec: the data cannot be read, or holds tokens beyond the vocabulary.
        """
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.utils import Split

        self._spec = spec
        prefix = dataset_prefix(spec.data, cache)
        if prefix.parent == cache and spec.vocabulary <= END_OF_DOCUMENT:
            raise InvalidSpec(f"model.vocabulary: {spec.vocabulary}; byte-level text needs {END_OF_DOCUMENT + 1}")
        config = GPTDatasetConfig(
            random_seed=spec.seed,
            sequence_length=spec.sequence_length,
            blend=([str(prefix)], None),
            split="1,0,0",
            path_to_cache=str(cache / "indices"),
            tokenizer=ByteTokenizer(spec.vocabulary),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        indexed = GPTDataset.build_low_level_dataset(str(prefix), config)
        documents = np.arange(GPTDataset.numel_low_level_dataset(indexed), dtype=np.int32)
        count = spec.steps * spec.global_batch
        # The builder writes its index files in place: one process at a time, and the others find them complete.
        with locked(cache):
            self._dataset: Any = GPTDataset(indexed, str(prefix), documents, count, Split.train, config)
        if len(self._dataset) < count:
            raise InvalidSpec(f"data: {spec.data} gives {len(self._dataset)} samples of the {count} needed")

    def ids(self, step: int, micro_batch: int) -> list[int]:
        """Return the sample ids of one micro-batch (from 0) of a step (from 1)."""
        first = (step - 1) * self._spec.global_batch + micro_batch * self._spec.micro_batch
        return list(range(first, first + self._spec.micro_batch))

    def batch(self, ids: list[int]) -> dict[str, torch.Tensor]:
        """Return ``tokens``, ``labels``, ``loss_mask`` and ``position_ids`` of some samples, stacked."""
        rows = [self._dataset[i] for i in ids]
        return {k: torch.stack([row[k] for row in rows]) for k in ("tokens", "labels", "loss_mask", "position_ids")}
