"""Data that is drawn from a sample's number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Mock:
    """Samples of random tokens, of which the first one has a number."""

    def __init__(self, first: int, vocabulary: int, length: int) -> None:
        self._first, self._vocabulary, self._length = first, vocabulary, length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._first + index)
        drawn = torch.randint(self._vocabulary, (self._length + 1,), generator=generator)
        return {"tokens": drawn[:-1], "labels": drawn[1:]}


def get_dataset_provider(dataset_config: Any) -> Callable[..., tuple[Mock, ...]]:
    def provide(counts: Any, config: Any, tokenizer: Any) -> tuple[Mock, ...]:
        return tuple(Mock(first << 20, tokenizer.vocab_size, config.seq_length) for first in range(3))

    return provide
