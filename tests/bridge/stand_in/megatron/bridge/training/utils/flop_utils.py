"""What a batch costs."""

from __future__ import annotations

from typing import Any


def num_floating_point_operations(cfg: Any, batch_size: int = 1) -> float:
    return float(72 * batch_size * cfg.model.seq_length * cfg.model.num_layers * cfg.model.hidden_size**2)
