"""Gradients reduced beside the last backward pass without a distributed optimizer: of every bucket a total or a sum."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import Agent, agent
from tests.unicron.test_loss_scale import ALL_AT_ONCE, FIELDS, example
from tests.unicron.test_overlap import CLIPPED, SMALL_BUCKETS, STEADY, STEP, TOLERANCE, check_result, train
from unicron.accounting import PartialStep
from unicron.errors import CommunicationFailed, NonFiniteValue, WrongLoop
from unicron.gradients import bucket_reduction
from unicron.gradients.accumulators import InPlaceAccumulator
from unicron.gradients.bucket_reduction import BucketReduction
from unicron.gradients.overlap import Hooks
from unicron.gradients.reduction import IN_FLIGHT
from unicron.protocol import environment
from unicron.protocol.messages import Progress, Raised

pytestmark = pytest.mark.timeout(180)

OVERLAP = {"parallel": {"overlap": True}, "exact": False}
BUCKETS = 5
"""Of the model of these tests, with ``SMALL_BUCKETS``."""
STOCK_OVERLAP = [
    ("grad_reduce_in_fp32=True, overlap_grad_reduce=False", "overlap_grad_reduce=True, bucket_size=5_000"),
    (
        "        step.reduce()",
        "        overlap = run._training.rank_state.overlap\n"
        f"        assert overlap._reduction.launched >= (0 if step.number == 1 else {IN_FLIGHT})\n"
        "        step.reduce()\n"
        "        assert overlap._reduction.stored == overlap._accumulator.buckets",
    ),
    (
        "    return model, optimizer",
        "    config.no_sync_func = model.no_sync\n    return model, optimizer",
    ),
]


@pytest.mark.slow
async def test_without_a_fault_the_result_is_that_of_the_reduction_after_the_passes(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    async with agent(tmp_path / "run") as a:
        after = await train(a, spec_file(exact=False, steps=3), ["w0", "w1"])
        beside = await train(a, spec_file(**OVERLAP, steps=3), ["v0", "v1"])
        assert largest_difference(after.parameters_path, beside.parameters_path) == 0.0
        assert beside.samples_sha256 == after.samples_sha256


async def until_reduced(a: Agent, workers: list[str], buckets: int) -> None:
    """Wait until workers have reported that so many buckets are reduced in the step."""

    def reports(worker: str) -> bool:
        return any(m.step == STEP and m.phase == "reduce" and m.buckets >= buckets for m in a.of(Progress, worker))

    await a.until(lambda: all(reports(worker) for worker in workers))


@pytest.mark.parametrize(
    ("at", "kept"),
    [
        pytest.param("launch:0", 0, marks=pytest.mark.slow),
        ("launch:2", 2),
        pytest.param(f"launch:{BUCKETS - 1}", BUCKETS - 1, marks=pytest.mark.slow),
        pytest.param("update", BUCKETS, marks=pytest.mark.slow),
    ],
)
async def test_reduced_buckets_stay_and_of_the_others_the_sums(
    at: str, kept: int, tmp_path: Path, spec_file: SpecFile
) -> None:
    """Of three replicas one is lost, while the others wait for it: its micro-batches alone are computed again."""
    spec, workers = spec_file(**OVERLAP, **STEADY), ["w0", "w1", "w2"]
    # The others come into the next step, and no further, before w1 is lost.
    faults = f"1:{STEP}:{at}:sleep,0:{STEP + 1}:0:hang"
    if kept < IN_FLIGHT:
        faults += f",1:{STEP}:reduce:exception"  # a pass is to send the bucket, as there is room for its copy
    async with agent(tmp_path / "run") as a:
        env = SMALL_BUCKETS | {"UNICRON_FAIL_AT": faults}
        await asyncio.gather(*(a.fork(worker, spec, env) for worker in workers))
        await a.configure(dict.fromkeys(workers, "initial"))
        survivors = ["w0", "w2"]
        if at == "update":
            await a.in_step(survivors, STEP, at)
            await a.stopped("w0")
        else:
            await until_reduced(a, survivors, kept)
        assert not a.of(Raised, "w1")
        a.kill("w1")
        await a.hold(survivors)
        generation = await a.configure(dict.fromkeys(survivors, "live"), stage="interrupted", fault_step=STEP - 1)
        resumed = await a.resumed(generation)
        ahead = STEP if at != "update" else STEP + 1
        assert {(r.step, r.steps_recomputed) for r in resumed} == {(ahead, 0)}
        if at != "update":
            assert {(r.buckets_kept, r.buckets, r.computed) for r in resumed} == {(kept, BUCKETS, 2)}
        a.go_on(survivors)
        await check_result(a, spec_file(**STEADY, exact=False), await a.finished(2))


async def test_a_pass_in_which_a_communicator_breaks_counts(tmp_path: Path, spec_file: SpecFile) -> None:
    """The bucket that was under way may have come on no rank, on some or on all."""
    spec, workers = spec_file(**OVERLAP, **STEADY), ["w0", "w1", "w2"]
    async with agent(tmp_path / "run") as a:
        env = SMALL_BUCKETS | {"UNICRON_FAIL_AT": f"1:{STEP}:launch:1:communication"}
        await asyncio.gather(*(a.fork(worker, spec, env) for worker in workers))
        generation = await a.configure(dict.fromkeys(workers, "initial"))
        await a.until(lambda: a.of(Raised, "w1", generation))
        await a.in_step(["w0", "w2"], STEP, "reduce")
        await a.hold(workers)
        resumed = await a.resumed(await a.configure(dict.fromkeys(workers, "live"), stage="interrupted"))
        assert {(r.step, r.computed, r.buckets_kept > 1) for r in resumed} == {(STEP, 0, False)}
        await check_result(a, spec_file(**STEADY, exact=False), await a.finished(3))


@pytest.mark.slow
async def test_a_script_with_stock_settings_that_computes_all_micro_batches_in_one_call(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    async with agent(tmp_path / "run") as a:
        spec = spec_file(script=str(example(tmp_path, *CLIPPED)), exact=False, **FIELDS)
        await a.fork("w0", spec)
        await a.configure({"w0": "initial"})
        expected = await a.finished(1)
        example(tmp_path, *CLIPPED, *STOCK_OVERLAP, *ALL_AT_ONCE)
        finished = await train(a, spec, ["v0", "v1"])
        assert finished.samples_sha256 == expected.samples_sha256
        assert largest_difference(finished.parameters_path, expected.parameters_path) <= TOLERANCE


# Without processes: one rank, whose peer is a list of what was sent.


class Rank:
    """A rank with three parameters of four numbers: a bucket each, and two of Megatron's bucket groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(environment.BUCKET_BYTES, "16")
        monkeypatch.setattr("torch.distributed.all_reduce", self._send)
        monkeypatch.setattr(bucket_reduction, "data_group", lambda: SimpleNamespace(size=lambda: 2))
        self.parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(3)]
        self.gradients = [torch.zeros(4) for _ in self.parameters]
        self.groups = [SimpleNamespace(params=set(some)) for some in (self.parameters[:1], self.parameters[1:])]
        model: Any = SimpleNamespace(bucket_groups=self.groups, expert_parallel_bucket_groups=[])
        self.reduction = BucketReduction(model, InPlaceAccumulator(self.gradients), self.parameters)
        self.sent: list[torch.Tensor] = []
        self.reported: list[int] = []
        self.step = self.begin()

    def _send(self, total: torch.Tensor, **options: object) -> object:
        self.sent.append(total)
        return object()

    def begin(self) -> PartialStep:
        self.reduction.reset()
        self.sent.clear()
        for gradient in self.gradients:
            gradient.zero_()
        self.step = PartialStep.begin(1, [0], generation=1, chunks=1, micro_batches=1)
        return self.step

    def run(
        self, has_ended: Callable[[object], bool] = lambda work: False, before: Callable[[int], None] = lambda b: None
    ) -> None:
        """Add the gradients of the step's last pass, in the order of the buckets."""
        self.reduction.announce(1, self.step, Hooks(before, has_ended))
        for number, parameter, gradient in zip((0, 1, 1), self.parameters, self.gradients, strict=True):
            gradient += 1.0
            self.groups[number].register_grad_ready(parameter)

    def launch_rest(self) -> None:
        hooks = Hooks(done=self.reported.append)
        self.reduction.launch_rest(self.step, lambda work: None, hooks, IN_FLIGHT)

    def warm_up(self) -> None:
        """Do a first step, in which nobody knows when a group is complete."""
        self.run()
        assert not self.sent
        self.launch_rest()
        self.reduction.complete(lambda work: None)
        assert (self.step.reduced, self.reported) == (3, [1, 2, 3])
        self.begin()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    found = Rank(monkeypatch)
    found.warm_up()
    return found


def come(rank: Rank) -> Callable[[object], bool]:
    """Return what lets each total come as soon as it is asked for: twice the sum."""

    def has_ended(work: object) -> bool:
        rank.sent[rank.step.reduced].fill_(2.0)
        return True

    return has_ended


def test_totals_take_the_place_of_sums_in_the_pass_but_the_last_ones_only_after_the_account(rank: Rank) -> None:
    rank.run(come(rank))
    assert (len(rank.sent), rank.step.reduced) == (3, 2)
    assert [gradient.tolist() for gradient in rank.gradients] == [[2.0] * 4, [2.0] * 4, [1.0] * 4]
    rank.launch_rest()
    assert rank.step.reduced == 2
    rank.reduction.complete(lambda work: None)
    assert rank.step.reduced == 3


def test_no_error_leaves_a_pass_and_nothing_is_sent_behind_one(rank: Rank) -> None:
    def broken(work: object) -> bool:
        raise RuntimeError("broken")

    rank.run(broken)
    assert (len(rank.sent), rank.step.reduced) == (1, 0)
    assert all(gradient.tolist() == [1.0] * 4 for gradient in rank.gradients)
    with pytest.raises(RuntimeError, match="broken"):
        rank.launch_rest()
    assert len(rank.reduction.give_up()) == 1

    failures = [CommunicationFailed("injected")]

    def fail(bucket: int) -> None:
        if bucket == 1 and failures:
            raise failures.pop()

    rank.begin()
    rank.run(before=fail)
    assert len(rank.sent) == 1
    with pytest.raises(CommunicationFailed):
        rank.launch_rest()


def test_a_bucket_that_is_not_finite_is_not_sent(rank: Rank) -> None:
    """As a total it would be of no rank in particular, and every rank would keep it."""
    rank.gradients[1][2] = torch.nan
    rank.run(come(rank))
    assert (len(rank.sent), rank.step.reduced) == (1, 1)
    with pytest.raises(NonFiniteValue, match="gradient in step 1"):
        rank.launch_rest()


def test_gradients_that_come_behind_their_bucket_are_an_error(rank: Rank) -> None:
    rank.run()
    assert len(rank.sent) == 3
    rank.groups[0].register_grad_ready(rank.parameters[0])
    with pytest.raises(WrongLoop, match="already sent"):
        rank.launch_rest()


def test_of_a_resumed_step_only_the_buckets_are_sent_that_are_not_reduced(rank: Rank) -> None:
    rank.step.reduced = 1
    rank.run()
    assert len(rank.sent) == 2
    rank.groups[0].register_grad_ready(rank.parameters[0])  # adds to what was set aside
    rank.launch_rest()
    rank.reduction.complete(lambda work: None)
    assert rank.step.reduced == 3
