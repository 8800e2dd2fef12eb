"""The checkpoint of a model that is not Megatron's: one file with the whole state, written by rank 0."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron.state.rank_state import RankState

FILE = "state.pt"
"""The name of the file."""


def plan(rank_state: RankState, position: dict[str, Any], folder: Path) -> Callable[[], list[str]]:
    """Copy the state, of which every rank has all.

    Args:
        rank_state: the rank's.
        position: saved beside the state.
        folder: where the file goes.

    Returns:
        What writes this rank's files and returns their names.
    """
    state: dict[str, Any] = {}
    if dist.get_rank() == 0:
        state = {"model": rank_state.model.state_dict(), "optimizer": rank_state.optimizer.state_dict()}
        state = copy.deepcopy(state) | position

    def write() -> list[str]:
        if not state:
            return []
        with open(folder / FILE, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return [FILE]

    return write


def load(rank_state: RankState, path: Path) -> dict[str, Any]:
    """Read a checkpoint into the model and its optimizer; return what was saved beside the state.

    Raises:
        OSError, RuntimeError: it cannot be read.
    """
    state: dict[str, Any] = torch.load(path / FILE, map_location="cpu")
    rank_state.model.load_state_dict(state["model"])
    rank_state.optimizer.load_state_dict(state["optimizer"])
    return state
