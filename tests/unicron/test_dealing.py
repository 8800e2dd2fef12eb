"""Micro-batches dealt by speed: any deal of a step gives the same update, to the last bit where sums are exact."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import Agent, agent, reference_of
from tests.unicron.test_recovery import TOLERANCE
from unicron.join.dealing import share
from unicron.protocol.messages import Progress


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_a_deal_is_a_partition_in_which_each_has_its_share(shares: list[int]) -> None:
    parts = [share(replica, len(shares), sum(shares), shares) for replica in range(len(shares))]
    assert [len(part) for part in parts] == shares
    assert sorted(k for part in parts for k in part) == list(range(sum(shares)))
    assert all(part == sorted(part) for part in parts)


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(0, 20))
def test_equal_shares_are_those_without_a_deal(replicas: int, micro_batches: int) -> None:
    shares = [len(share(replica, replicas, micro_batches)) for replica in range(replicas)]
    for replica in range(replicas):
        assert share(replica, replicas, micro_batches, shares) == share(replica, replicas, micro_batches)


@pytest.mark.parametrize("shares", [[], [5], [4, 4, 4], [6, 5]])
def test_shares_of_another_step_or_of_other_replicas_count_for_nothing(shares: list[int]) -> None:
    assert [share(replica, 2, 12, shares) for replica in range(2)] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]


def computed(a: Agent, worker: str, generation: int, step: int) -> list[int]:
    """The micro-batches that a worker has reported of a step."""
    found = [m for m in a.of(Progress, worker, generation) if m.step == step and m.micro_batch is not None]
    return sorted({m.micro_batch for m in found if m.micro_batch is not None})


@pytest.mark.parametrize(
    "exact", [pytest.param(True, id="exact", marks=pytest.mark.slow), pytest.param(False, id="default")]
)
async def test_a_step_dealt_by_speed_is_the_same_update(exact: bool, tmp_path: Path, spec_file: SpecFile) -> None:
    """Dealt by speed; then a replica is lost within a step, which is dealt to the others as ever."""
    spec = spec_file(exact=exact, **({} if exact else {"optimizer": {"name": "sgd", "lr": 0.1}}))
    workers = ["w0", "w1", "w2"]
    async with agent(tmp_path / "run") as a:
        stops = {"UNICRON_FAIL_AT": "2:4:1:hang"}
        await asyncio.gather(*(a.fork(worker, spec, stops) for worker in workers))
        first = await a.configure(dict.fromkeys(workers, "initial"), shares={w: [7, 3, 2] for w in workers})
        await a.resumed(first)
        await a.lose("w2", 4)
        assert [len(computed(a, worker, first, 2)) for worker in workers] == [7, 3, 2]
        assert computed(a, "w1", first, 2) == [1, 4, 7]
        await a.hold(["w0", "w1"])
        await a.resumed(await a.configure(dict.fromkeys(["w0", "w1"], "live"), stage="interrupted"))
        finished = await a.finished(2)
        reference = await reference_of(a, spec)
        assert (finished.step, finished.samples_sha256) == (reference.step, reference.samples_sha256)
        difference = largest_difference(finished.parameters_path, reference.parameters_path)
        assert difference == 0.0 if exact else difference <= TOLERANCE
