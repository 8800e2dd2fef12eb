"""What scripts report of their losses."""

from __future__ import annotations

import pytest
import torch

from unicron.megatron_lm.reports import averaging

pytestmark = pytest.mark.timeout(60)


def test_losses_are_averaged_over_replicas_in_evaluations_alone() -> None:
    """In a step's passes replicas have different numbers of micro-batches: a collective would wait in vain."""
    asked: list[list[float]] = []

    def stock(losses: list[torch.Tensor], group: str) -> torch.Tensor:
        asked.append([float(loss) for loss in losses])
        return torch.full((len(losses),), len(group))

    averaged = averaging(stock)
    loss = (torch.ones(1, requires_grad=True) * 2.0).sum()
    found = averaged([loss, torch.tensor(3.0)], group="data")
    assert found.tolist() == [2.0, 3.0]
    assert not found.requires_grad
    assert asked == []
    with torch.no_grad():
        assert averaged([loss], group="data").tolist() == [4.0]
    assert asked == [[2.0]]
