"""References to process groups: in Megatron's globals, and inside the modules and optimizers that were built with them.

A stale reference keeps a group's threads and sockets. A model that lives on in a new generation therefore gets the new
groups in place of the old ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


def groups_by_role() -> dict[str, Any]:
    """Return Megatron's process groups by the name of the global variable that contains each."""
    from megatron.core import parallel_state

    found: dict[str, Any] = {}
    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):
            found[name] = value
    return found


def replace_groups(roots: Iterable[Any], old: dict[str, Any], new: dict[str, Any]) -> int:
    """Replace every reference to an old group, in the objects reachable from ``roots``, by the group of the same role.

    Args:
        roots: models and optimizers.
        old: groups by role, as ``groups_by_role`` returned them before.
        new: groups by role now.

    Returns:
        The number of references replaced.
    """
    successors = {id(group): new[name] for name, group in old.items() if name in new}
    seen: set[int] = set()
    pending: list[Any] = list(roots)
    count = 0
    while pending:
        container = pending.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        target, items = _items(container)
        for key, value in items:
            if id(value) in successors and target is not None:
                target[key] = successors[id(value)]
                count += 1
            elif isinstance(value, dict | list | tuple | set) or _may_contain_groups(value):
                pending.append(value)
    return count


def _items(container: Any) -> tuple[Any, Iterable[tuple[Any, Any]]]:
    """Return what can be assigned to (None: nothing can), and the keys and values of a container or object."""
    if isinstance(container, dict):
        return container, list(container.items())
    if isinstance(container, list):
        return container, list(enumerate(container))
    if isinstance(container, tuple | set):
        return None, list(enumerate(container))
    attributes = getattr(container, "__dict__", None)
    return attributes, list(attributes.items()) if attributes is not None else []


def _may_contain_groups(value: Any) -> bool:
    kind = type(value)
    return isinstance(value, torch.nn.Module) or (
        kind.__module__.startswith("megatron.") and not isinstance(value, type) and hasattr(value, "__dict__")
    )
