"""Losses that are noted now and read later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unicron.errors import NonFiniteValue, WrongLoop
from unicron.losses import noted, read
from unicron.state.rank_state import RankState


class CountedReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what makes the host wait for a value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_a_loss_is_read_as_the_training_loop_has_computed_it() -> None:
    value = torch.tensor([0.1], requires_grad=True)
    half = torch.tensor(0.3, dtype=torch.bfloat16)
    found = read({0: noted(value), 1: noted(half), 2: 0.5, 3: noted((torch.tensor(3.0), torch.tensor(4)))})
    assert found == {0: float(value.detach()), 1: float(half), 2: 0.5, 3: 0.75}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_that_is_changed_in_place_afterwards_is_kept_as_it_was(dtype: torch.dtype) -> None:
    loss = torch.tensor(2.0, dtype=dtype)
    kept = noted(loss)
    loss.div_(8)
    assert read({0: kept}) == {0: 2.0}


def test_noting_reads_nothing() -> None:
    with CountedReads() as counted:
        noted(torch.tensor(1.0))
        noted((torch.tensor(1.0), torch.tensor(2)))
    assert counted.reads == 0


def test_a_loss_of_several_elements_is_refused() -> None:
    with pytest.raises(WrongLoop, match=r"shape \[2\]"):
        noted(torch.ones(2))


def rank_state() -> RankState:
    model = torch.nn.Linear(2, 1)
    state = RankState(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=2)
    state.set_version(0, b"")
    state.begin(1, [0, 1], 1, micro_batches=2)
    return state


def test_a_loss_that_is_not_finite_is_found_when_the_losses_are_read_and_names_its_micro_batch() -> None:
    state = rank_state()
    for k, loss in enumerate((1.0, float("nan"))):
        state.commit({k: noted(torch.tensor(loss))}, {k: [k]})
    with pytest.raises(NonFiniteValue, match="micro-batch 1 of step 1") as raised:
        state.finite.read_losses(state.step_in_progress)
    assert raised.value.micro_batch == 1


def test_in_a_step_that_is_done_again_a_loss_is_checked_at_once() -> None:
    state = rank_state()
    state.finite.each_until = 1
    with pytest.raises(NonFiniteValue, match="micro-batch 0 of step 1"):
        state.commit({0: noted(torch.tensor(float("inf")))}, {0: [0]})


def test_a_step_has_its_losses_as_numbers_once_they_are_read() -> None:
    state = rank_state()
    for k in (0, 1):
        state.commit({k: noted(torch.tensor(k + 1.0))}, {k: [k]})
    state.finite.read_losses(state.step_in_progress)
    assert state.step_in_progress.losses == {0: 1.0, 1: 2.0}
