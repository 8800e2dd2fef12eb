"""The loss scale of Megatron's optimizer as a part of the state, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unicron.gradients.accumulators import InPlaceAccumulator
from unicron.gradients.reduction import Reduction
from unicron.megatron import cpu
from unicron.megatron.grad_scaler import NAME, GradScaler
from unicron.megatron.schedule import LossScale
from unicron.state.tensors import StateTensors
from unicron.state.update import Stage, Update

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("megatron"),
    # Megatron's, about a default of its own.
    pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning"),
]


@pytest.fixture(autouse=True)
def tensors_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's scaler makes its own on a device."""
    monkeypatch.setattr(torch, "tensor", cpu._on_cpu(torch.tensor))


class Optimizer:
    """Megatron's optimizer as the library sees it, around plain descent; skips updates whose gradients are infinite."""

    def __init__(self, model: torch.nn.Module) -> None:
        from megatron.core.optimizer.grad_scaler import DynamicGradScaler

        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.grad_scaler = DynamicGradScaler(
            initial_scale=64.0, min_scale=1.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2, hysteresis=2
        )

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = loss * self.grad_scaler.scale
        return scaled

    def step(self) -> tuple[bool, None, None]:
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
        found = not all(bool(torch.isfinite(one).all()) for one in gradients)
        self.grad_scaler.update(found)
        if not found:
            self.optimizer.step()
        return not found, None, None


def made(gradient: float = 1.0) -> tuple[torch.nn.Module, Any, GradScaler, Update]:
    model = torch.nn.Linear(1, 1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer = Optimizer(model)
    scaler = GradScaler(optimizer)
    return model, optimizer, scaler, Update(optimizer, scaler)


def state(optimizer: Any) -> tuple[float, int, int]:
    found = optimizer.grad_scaler.state_dict()
    return float(found["scale"]), found["growth_tracker"], found["hysteresis_tracker"]


def test_a_skipped_update_is_an_update_and_its_scale_moves_to_another_rank() -> None:
    model, optimizer, scaler, update = made(float("inf"))
    assert optimizer.step() == (False, None, None)
    assert (update.stage, scaler.skipped, state(optimizer)) == (Stage.SKIPPED, True, (64.0, 0, 1))
    update.reset()
    optimizer.step()
    assert state(optimizer) == (32.0, 0, 0)
    other, others_optimizer, others, _ = made()
    (theirs,) = [
        view for chunk, view in StateTensors(other, others_optimizer, others).chunks().items() if chunk.name == NAME
    ]
    (ours,) = [view for chunk, view in StateTensors(model, optimizer, scaler).chunks().items() if chunk.name == NAME]
    theirs.copy_(ours)
    others.load()
    assert (state(others_optimizer), others.skipped, others.skips) == ((32.0, 0, 0), True, 2)


def test_an_optimizer_that_counts_by_group_counts_no_skipped_updates() -> None:
    model, optimizer, scaler, update = made(float("inf"))
    optimizer.step()
    update.reset()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    StateTensors(model, optimizer, scaler).count_steps(2)
    assert [group["step"] for group in optimizer.optimizer.param_groups] == [1]
    scaler.reset()
    assert scaler.skips == 0


def test_what_an_update_that_was_broken_off_has_done_to_the_scale_is_undone() -> None:
    _, optimizer, scaler, update = made()
    optimizer.step()
    assert (update.stage, scaler.skipped, state(optimizer)) == (Stage.APPLIED, False, (64.0, 1, 2))
    optimizer.grad_scaler.update(found_inf=True)  # and a collective breaks behind it
    scaler.restore()
    assert state(optimizer) == (64.0, 1, 2)
    scaler.reset()
    scaler.restore()
    assert state(optimizer) == (64.0, 0, 2)


def test_an_optimizer_without_a_scale_is_left_as_it_is() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, scaler = optimizer.step, GradScaler(optimizer)
    Update(optimizer, scaler)
    scaler.restore()
    scaler.keep(skipped=False)
    assert optimizer.step == step
    assert (scaler.applies, scaler.replicas, scaler.skipped) == (False, 1.0, False)
    assert all(chunk.name != NAME for chunk in StateTensors(model, optimizer, scaler).chunks())


def test_losses_are_scaled_and_count_for_the_replicas_that_the_task_began_with() -> None:
    from megatron.core.transformer import TransformerConfig

    _, _, scaler, _ = made()
    scaler.spread(3)
    model: Any = torch.nn.Linear(1, 1)
    model.module = SimpleNamespace(sharded_state_dict=dict)
    model.config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    scale = LossScale(model, 12, scaler)
    scale.begin_call(4)
    assert model.config.grad_scale_func is scale
    loss = torch.tensor([2.0], requires_grad=True)
    assert scale(loss).item() == 2.0 * 64.0 * 4 / 12 * 3


@pytest.mark.parametrize("replicas", [1, 2])
def test_sums_are_divided_by_them_once_as_they_are_reduced(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they are added up, since undivided they would be too large; and also on one replica that is left."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda total, **_: total.add_(total))
    sums = InPlaceAccumulator([torch.full((3,), 40_000.0, dtype=torch.float16)], least=torch.float16)
    sums.portion, sums.is_checked = 0.5, False
    reduction = Reduction(sums, 0, SimpleNamespace(size=lambda: replicas), lambda count: None)
    reduction.run(lambda work: None, lambda bucket: None, until=sums.buckets)
    assert sums.tensors[0].tolist() == [20_000.0 * replicas] * 3
    sums.store(0, torch.full((3,), float("inf"), dtype=torch.float16))
    sums.check_finite(0)
