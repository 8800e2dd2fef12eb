"""What this library needs to know about an optimizer: torch's optimizers inside Megatron's, and what they update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from unicron.megatron.model import model_chunks

OF_PEERS = "unicron_of_peers"
"""A key of parameter groups that are empty, and are here since other ranks have them (``state.optimizer_groups``)."""


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers inside Megatron's wrappers; a torch optimizer itself is the only one."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    chained = getattr(optimizer, "chained_optimizers", None)
    return [found for one in (chained or [optimizer.optimizer]) for found in torch_optimizers(one)]


def is_distributed(model: Any) -> bool:
    """Return whether data-parallel ranks divide the optimizer's state among them (Megatron's distributed optimizer)."""
    return bool(getattr(getattr(model_chunks(model)[0], "ddp_config", None), "use_distributed_optimizer", False))


class UpdatedRange(NamedTuple):
    """The part of one parameter that an optimizer updates, and the tensor that it updates in its place."""

    main: torch.Tensor
    """The tensor that torch's optimizer keeps its state for; possibly a float32 copy of the parameter."""
    start: int
    stop: int
    """The range of the flattened parameter that ``main`` stands for."""
    is_copy: bool
    """Whether ``main`` is a copy and not the parameter itself."""


def updated_ranges(optimizer: Any) -> Iterator[tuple[torch.Tensor, UpdatedRange]]:
    """Yield each parameter of the model that the optimizer updates on this rank, with the range that it updates."""
    for one in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        ranges = getattr(one, "model_param_group_index_map", None)
        if ranges is not None:  # Megatron's distributed optimizer
            for parameter, (group, order) in ranges.items():
                owned = one._get_model_param_range_map(parameter)["param"]
                main = one.optimizer.param_groups[group]["params"][order]
                yield parameter, UpdatedRange(main, owned.start, owned.end, main.dtype != parameter.dtype)
            continue
        halves = zip(getattr(one, "float16_groups", []), getattr(one, "fp32_from_float16_groups", []), strict=True)
        copies = {copy: half for group, mains in halves for half, copy in zip(group, mains, strict=True)}
        for inner in torch_optimizers(one):
            for group in inner.param_groups:
                for main in group["params"]:
                    yield copies.get(main, main), UpdatedRange(main, 0, main.numel(), main in copies)


def count_steps(optimizer: Any, steps: int) -> None:
    """Set the count of steps where an optimizer keeps one count for all parameters of a group.

    Transformer Engine's and Apex's Adam do (``group["step"]``); Megatron prefers those where they are installed.
    Torch's Adam keeps one count with each parameter, as a tensor, which moves with the state.
    """
    for one in torch_optimizers(optimizer):
        if not any("step" in state for state in one.state.values()):
            for group in one.param_groups:
                group["step"] = steps


def group_counts(optimizer: Any) -> set[int]:
    """Return the counts of updates that an optimizer keeps for all parameters of a group; empty for torch's own.

    A group without an update has no count.
    """
    return {
        group.get("step", 0)
        for one in torch_optimizers(optimizer)
        if not type(one).__module__.startswith("torch.")
        for group in one.param_groups
        if group["params"]
    }


def renew_scales(optimizer: torch.optim.Optimizer) -> None:
    """Make what Transformer Engine's Adam has beside a state that is not float32: a factor.

    It reads the factor of a state in bfloat16, too, though it applies none there. Where it keeps a factor that counts,
    in float16 and fp8, the optimizer is refused (``unicron.megatron.supported``).
    """
    scales: dict[torch.Tensor, dict[str, torch.Tensor]] | None = getattr(optimizer, "_scales", None)
    if scales is not None:
        scales.clear()
        for main, state in optimizer.state.items():
            scales[main] = {
                kind: torch.ones(1, device=main.device) for kind, one in state.items() if one.dtype != torch.float32
            }


def reset_counts(optimizer: Any) -> None:
    """Forget the counts of steps, and renew the float32 copies of half-precision parameters from the parameters."""
    for one in torch_optimizers(optimizer):
        for group in one.param_groups:
            group.pop("step", None)  # the place where fused optimizers count
    if hasattr(optimizer, "reload_model_params"):  # Megatron's
        optimizer.reload_model_params()
