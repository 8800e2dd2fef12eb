"""What snapshots are of: which task, and which tensors."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from unicron.megatron.optimizer import torch_optimizers
from unicron.protocol import environment
from unicron.state.rank_state import RankState
from unicron.state.user_state import Record


def addresses_of(rank_state: RankState, record: Record | None) -> list[int]:
    """Return the addresses of tensors that an optimizer, or the user, may replace by new ones."""
    states = (state for one in torch_optimizers(rank_state.optimizer) for state in one.state.values())
    found = [value.data_ptr() for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return found if record is None else [*found, *(value.data_ptr() for value in record.chunks.values())]


def identity() -> str:
    """Return a digest of the task's specification, in which tasks of the same name differ."""
    path = os.environ.get(environment.SPEC, "")
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else ""
