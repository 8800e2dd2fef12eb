"""Values that are not finite: the first parameter is named, and the micro-batch as soon as it is certain."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.unicron.conftest import SpecFile
from tests.unicron.harness import agent
from tests.unicron.test_loss_scale import ALL_AT_ONCE, FIELDS, example
from tests.unicron.test_overlap import CLIPPED, STOCK_OVERLAP
from tests.unicron.test_scripts import script
from unicron.accounting import EMPTY_DIGEST
from unicron.errors import NonFiniteValue
from unicron.gradients.precision import Precision
from unicron.protocol.messages import Raised
from unicron.state.rank_state import RankState

pytestmark = pytest.mark.timeout(180)

SPOILT = 2
"""The micro-batch that brings a gradient that is no number."""


def one_rank(precision: Precision) -> RankState:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    state = RankState(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=4, precision=precision)
    state.set_version(0, EMPTY_DIGEST)
    state.begin(1, [0, 1, 2, 3], 1, micro_batches=4)
    return state


def compute(state: RankState, k: int, *, loss: float = 1.0) -> None:
    """Compute a micro-batch; the one that is spoilt brings an infinite gradient of the last layer's two parameters."""
    state.model(torch.ones(4) + k).square().sum().backward()
    if k == SPOILT:
        for parameter in list(state.model.parameters())[2:]:
            parameter.grad.view(-1)[-1] = torch.inf
    state.commit({k: loss}, {k: [k]})


def compute_all(state: RankState) -> None:
    for k in range(4):
        compute(state, k)
    state.finite.sums(state.step_in_progress)


def spoilt(state: RankState) -> NonFiniteValue:
    """Compute the step; return the error that it ends with."""
    with pytest.raises(NonFiniteValue) as raised:
        compute_all(state)
    return raised.value


@pytest.mark.parametrize("precision", list(Precision))
def test_the_first_parameter_is_named_and_the_micro_batch_where_it_is_certain(precision: Precision) -> None:
    error = spoilt(one_rank(precision))
    assert error.parameter == "2.weight"
    assert "step 1" in str(error)
    assert error.micro_batch == (SPOILT if precision is Precision.EXACT else None)
    if precision is not Precision.EXACT:
        assert "one of the micro-batches 0, 1, 2, 3" in str(error)


@pytest.mark.parametrize("precision", list(Precision))
def test_in_a_step_that_is_done_again_the_micro_batch_is_named(precision: Precision) -> None:
    state = one_rank(precision)
    state.finite.each_until = 1
    error = spoilt(state)
    assert (error.parameter, error.micro_batch) == ("2.weight", SPOILT)
    assert state.step_in_progress.done[0] <= {0, 1, SPOILT}  # none is computed behind it


def test_what_a_restarted_step_has_forgotten_counts_as_unchecked_again() -> None:
    state = one_rank(Precision.FLOAT32)
    state.finite.each_until = 1
    compute(state, 0)
    compute(state, 1)
    state.begin(1, [1, 2, 3], 2, micro_batches=4)
    state.finite.each_until = 0
    compute(state, 1)
    compute(state, SPOILT)
    with pytest.raises(NonFiniteValue, match="one of the micro-batches 1, 2"):
        state.finite.sums(state.step_in_progress)


def test_a_loss_names_its_micro_batch_and_the_parameter() -> None:
    state = one_rank(Precision.FLOAT32)
    with pytest.raises(NonFiniteValue) as raised:
        compute(state, SPOILT, loss=float("nan"))
    assert (raised.value.parameter, raised.value.micro_batch) == ("2.weight", SPOILT)


async def test_the_survivor_that_meets_the_value_again_names_the_micro_batch(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    bad = "if (step.number, k) == (2, 7): list(run.model.parameters())[1].grad[3] = float('nan')"
    spec = spec_file(script=script(tmp_path, backward=bad), exact=False)
    async with agent(tmp_path / "run") as a:
        await asyncio.gather(*(a.fork(worker, spec) for worker in ("w0", "w1")))
        await a.configure({"w0": "initial", "w1": "initial"})
        await a.until(lambda: [r for r in a.of(Raised) if r.kind == "non_finite"])
        (first,) = [r for r in a.of(Raised) if r.kind == "non_finite"]
        assert (first.parameter, first.micro_batch, first.step) == ("0.bias", None, 2)
        survivor = next(w for w in ("w0", "w1") if not any(r is first for r in a.of(Raised, w)))
        await a.hold([survivor])
        await a.configure({survivor: "live"}, stage="interrupted", fault_step=1)
        await a.until(lambda: [r for r in a.of(Raised, survivor) if r.kind == "non_finite"])
        again = next(r for r in a.of(Raised, survivor) if r.kind == "non_finite")
        assert (again.parameter, again.micro_batch, again.step) == ("0.bias", 7, 2)


SPOILS = [
    (
        "    return model, optimizer",
        "    spoilt = dict(model.named_parameters())['module.decoder.layers.0.mlp.linear_fc1.weight']\n"
        "    spoilt.register_hook(lambda gradient: gradient * (float('inf') if number == 2 else 1.0))\n"
        "    return model, optimizer",
    ),
    (
        "for step in run.steps():  # + in place of `for iteration in range(STEPS)`",
        "number = 0\nfor step in run.steps():\n    number = step.number",
    ),
]
"""From step 2 on, one weight has gradients that are not finite, while all losses are."""


async def test_sums_that_are_reduced_beside_the_passes_name_the_first_parameter(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    """With the distributed optimizer of a stock Megatron loop."""
    spec = spec_file(
        script=str(example(tmp_path, *CLIPPED, *STOCK_OVERLAP, *ALL_AT_ONCE, *SPOILS)), exact=False, **FIELDS
    )
    async with agent(tmp_path / "run") as a:
        await asyncio.gather(*(a.fork(worker, spec) for worker in ("w0", "w1")))
        await a.configure({"w0": "initial", "w1": "initial"})
        await a.until(lambda: [r for r in a.of(Raised) if r.kind == "non_finite"])
        raised = next(r for r in a.of(Raised) if r.kind == "non_finite")
        assert (raised.step, raised.parameter) == (2, "decoder.layers.0.mlp.linear_fc1.weight")
