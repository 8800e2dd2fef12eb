"""Megatron's distributed checkpoints, saved without waiting for peers (``megatron.core.dist_checkpointing``).

Megatron plans a save, copies and writes the files, and describes what all ranks have written, with collectives in
between. Here the plan and the copy are made at a step boundary by all ranks together; the files are written, and at the
end described, by threads that wait for no peer (``unicron.checkpoint.writer``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from unicron.megatron.model import checkpoint_metadata

FORMAT = ("torch_dist", 1)
"""Megatron's name and version of the folder's format."""

WriteResults = list[Any]
"""What Megatron's writer reports of the tensors that one rank wrote: where each of them is."""


def state_dict(model: Any, optimizer: Any, *, loading: bool = False) -> dict[str, Any]:
    """Return the sharded state of a Megatron model and its optimizer.

    Args:
        model: Megatron's DistributedDataParallel.
        optimizer: Megatron's.
        loading: whether a checkpoint is to be read into it.
    """
    metadata = checkpoint_metadata()
    model_state = model.module.sharded_state_dict(metadata=metadata)
    optimizer_state = optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=metadata)
    return {"model": model_state, "optimizer": optimizer_state}


def load(model: Any, optimizer: Any, path: Path) -> dict[str, Any]:
    """Read a checkpoint into a model and its optimizer, in whatever layout it was written. All ranks call it.

    Returns:
        What was saved beside the state.

    Raises:
        OSError, RuntimeError: the checkpoint cannot be read.
    """
    from megatron.core import dist_checkpointing

    state: dict[str, Any] = dist_checkpointing.load(state_dict(model, optimizer, loading=True), str(path))
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state


class PlannedSave(NamedTuple):
    """One rank's part of a save, copied and ready to be written."""

    write: Callable[[], tuple[WriteResults, list[str]]]
    """Writes the part's files; returns what Megatron reports of them, and their names."""
    describe: Callable[[list[WriteResults]], list[str]]
    """On rank 0: writes the description of all ranks' parts; returns the names of its files."""


class SavePlanner:
    """Plans the saves of one generation; what the ranks have planned once they need not plan again."""

    def __init__(self) -> None:
        """Prepare in the generation's process groups."""
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        planner = self
        # Megatron warns of "old" files in the folder: those of faster ranks, as no rank waits for another here.
        logging.getLogger("megatron.core.dist_checkpointing.serialization").setLevel(logging.ERROR)

        class Split(TorchDistSaveShardedStrategy):  # type: ignore[misc]
            def _get_save_and_finalize_callbacks(self, writer: Any, saved: Any) -> Any:
                planner._writer, planner._metadata = writer, saved[1]
                return super()._get_save_and_finalize_callbacks(writer, saved)

        self._writer: Any = None
        self._metadata: Any = None
        # Each data-parallel replica writes its share of the shard that all of them have.
        self._strategy = FullyParallelSaveStrategyWrapper(
            Split(*FORMAT, cached_metadata=True), parallel_state.get_data_parallel_group(), do_cache_distribution=True
        )
        self._access_checked = False

    def plan(self, state: dict[str, Any], folder: Path) -> PlannedSave:
        """Plan a save and copy the state; all ranks call it.

        Args:
            state: the result of ``state_dict``, and whatever else is to be saved.
            folder: where the files go.

        Raises:
            RuntimeError: a collective failed.
        """
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        request = dist_checkpointing.save(
            state,
            str(folder),
            sharded_strategy=self._strategy,
            validate_access_integrity=not self._access_checked,
            async_sharded_save=True,
        )
        self._access_checked = True
        writer, metadata = self._writer, self._metadata
        function, arguments = request.async_fn, list(request.async_fn_args)
        if function is not None:
            arguments[1] = _copied(arguments[1])
        names = [name for _, name, _ in arguments[1]] if function is not None else []
        if dist.get_rank() == 0:
            names.append("common.pt")  # written by now

        def write() -> tuple[WriteResults, list[str]]:
            if function is not None:
                function(*arguments)
            results = writer.retrieve_write_results()
            if isinstance(results, tuple):  # torch's wrapped exception
                raise results[0]
            return results, names

        def describe(parts: list[WriteResults]) -> list[str]:
            writer.finish(metadata, parts)
            save_config(CheckpointingConfig(*FORMAT), str(folder))
            return [".metadata", "metadata.json"]

        return PlannedSave(write, describe)


def _copied(buckets: Sequence[Any]) -> list[Any]:
    """Return what a writer is to write, copied to memory of its own: training goes on in the original."""
    return [
        (path, name, (plain, [(item, tensor.to("cpu", copy=True)) for item, tensor in tensors]))
        for path, name, (plain, tensors) in buckets
    ]
