"""Faults that a user asks for, in the process: when they happen, and what they change. Processes are in tests/e2e."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

from unicron.process.faults import FaultInjector, InjectedFault
from unicron.protocol.messages import Inject


def begin(faults: FaultInjector, step: int, model: torch.nn.Module | None = None, *, computes: bool = False) -> None:
    faults.reached_micro_batch(step, 0, [model] if model is not None else [], computes=computes)


def injector(*requests: Inject, began: int = 0) -> FaultInjector:
    """Return the faults of a process that has begun steps, with requests."""
    faults = FaultInjector()
    for step in range(1, began + 1):
        begin(faults, step)
    for request in requests:
        faults.request(request)
    return faults


def test_a_fault_happens_once_at_its_step_and_says_when(capsys: pytest.CaptureFixture[str]) -> None:
    request = Inject(id="f1", kind="exception", step=5)
    faults = injector(request, request, began=3)
    begin(faults, 4)
    faults.reached(4, "reduce")
    with pytest.raises(InjectedFault):
        begin(faults, 5)
    faults.request(request)
    for step in (5, 6):
        begin(faults, step)
        faults.reached(step, "reduce")
    said = re.findall(r"injected fault f1: (.*) at step (\d+); unix time [\d.]+", capsys.readouterr().err)
    assert said == [("exception", "5")]


def test_without_a_step_it_is_the_next_that_begins() -> None:
    faults = injector(Inject(id="f", kind="exception"), began=3)
    faults.reached(3, "reduce")
    with pytest.raises(InjectedFault):
        begin(faults, 4)


def test_a_rank_without_micro_batches_fails_before_the_reduction() -> None:
    faults = injector(Inject(id="f", kind="exception", step=4), began=3)
    with pytest.raises(InjectedFault):
        faults.reached(4, "reduce")


def test_a_step_that_has_begun_is_too_late(capsys: pytest.CaptureFixture[str]) -> None:
    faults = injector(Inject(id="f", kind="exception", step=3), Inject(id="g", kind="melt"), began=3)
    for step in (3, 4):
        begin(faults, step)
        faults.reached(step, "reduce")
    assert capsys.readouterr().err.count("does not happen") == 2


def test_a_spike_changes_what_one_step_reports() -> None:
    faults = injector(Inject(id="f", kind="spike", argument="10", step=2))
    found = []
    for step in (1, 2, 3):
        begin(faults, step)
        found.append(faults.finished_passes(step, [1.0, 2.0]))
    assert found == [[1.0, 2.0], [10.0, 20.0], [1.0, 2.0]]


def test_a_slow_rank_sleeps_after_its_passes_until_it_is_as_fast_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = starved_s = 0.0
    slept: list[float] = []
    monkeypatch.setattr("unicron.process.faults.time.monotonic", lambda: now_s)
    monkeypatch.setattr("unicron.process.faults.time.sleep", slept.append)
    monkeypatch.setattr("unicron.process.faults.run_queue_wait_s", lambda: starved_s)
    faults = injector(Inject(id="f", kind="slow", argument="3", step=2))
    for step in (1, 2, 3):
        begin(faults, step)
        now_s, starved_s = now_s + 0.5 + 4.0, starved_s + 4.0  # the rank has waited for a CPU, too
        faults.finished_passes(step, [])
    faults.request(Inject(id="g", kind="slow", argument="1"))
    begin(faults, 4)
    faults.finished_passes(4, [])
    assert slept == [1.0, 1.0]


def test_a_slow_rank_of_a_replica_of_several_computes_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its passes wait for peers, which is no time of its thread; a sleep would be none either."""
    looks = itertools.count()
    monkeypatch.setattr("unicron.process.faults.time.thread_time", lambda: float(next(looks)))
    monkeypatch.setattr("unicron.process.faults.time.sleep", lambda seconds: pytest.fail("it slept"))
    faults = injector(Inject(id="f", kind="slow", argument="11", step=1))
    begin(faults, 1, computes=True)  # the first look; the second is at the end of the passes: they have taken 1 s
    faults.finished_passes(1, [])  # 10 s are missing from the third look on, and the last one begins the next passes
    assert next(looks) == 2 + 11 + 1


@pytest.mark.parametrize(("name", "spoilt"), [("", "0.weight"), ("1.bias", "1.bias"), ("bias", "0.bias")])
def test_one_element_of_a_gradient_is_not_finite_once(name: str, spoilt: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    faults = injector(Inject(id="f", kind="nan", argument=name, step=2))
    for step, expected in ((1, []), (2, [spoilt]), (3, [])):
        begin(faults, step, model)
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        bad = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()}
        assert list(bad) == expected
        assert all(math.isnan(gradient.view(-1)[0]) and gradient.isnan().sum() == 1 for gradient in bad.values())
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_parameter_that_the_rank_does_not_have_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(1, 1)
    faults = injector(Inject(id="f", kind="nan", argument="other"))
    begin(faults, 1, model)
    model(torch.ones(1, 1)).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.isfinite().all()
    assert "no parameter 'other'" in capsys.readouterr().err
