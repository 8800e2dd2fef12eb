"""The reduction of a step's gradients, over collectives of the test's: what is under way, and in which memory."""

from __future__ import annotations

import pytest
import torch

from unicron.gradients import reduction
from unicron.gradients.accumulators import InPlaceAccumulator
from unicron.protocol import environment

SIZES = [5, 1, 7]
"""Elements of the model's tensors."""


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set buckets of four float32 numbers: some end within a tensor, some span tensors."""
    monkeypatch.setenv(environment.BUCKET_BYTES, "16")


def sums_of_a_step() -> InPlaceAccumulator:
    return InPlaceAccumulator([torch.zeros(size) for size in SIZES])


class Pair:
    """A group of two ranks."""

    def size(self) -> int:
        return 2


class Sent:
    """A collective under way."""

    def __init__(self, bucket: int) -> None:
        self.bucket = bucket


@pytest.mark.parametrize("fails", range(3))
def test_collectives_under_way_behind_one_that_breaks_are_reported(fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them may never end, and the group must not be destroyed before them."""
    sent: list[Sent] = []
    waited: list[int] = []
    done: list[int] = []

    def all_reduce(total: torch.Tensor, **options: object) -> Sent:
        sent.append(Sent(len(sent)))
        return sent[-1]

    def wait(work: Sent) -> None:
        waited.append(work.bucket)
        if work.bucket == fails:
            raise RuntimeError("broken")

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    left: list[object] = []
    sums = sums_of_a_step()
    with pytest.raises(RuntimeError, match="broken"):
        reduction.reduce(
            sums, 0, Pair(), wait, before=lambda bucket: None, done=done.append, broken=left.extend, in_flight=3
        )
    assert (waited, done) == ([*range(fails + 1)], [*range(1, fails + 1)])
    assert left == sent[fails + 1 :]
    assert len(left) == min(2, sums.buckets - fails - 1)


def test_the_memory_of_copies_is_used_again_but_not_of_those_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that broke may still write into its copy."""
    sent: list[torch.Tensor] = []

    def all_reduce(total: torch.Tensor, **options: object) -> torch.Tensor:
        sent.append(total)
        return total

    def wait(work: torch.Tensor) -> None:
        if len(sent) == 2 * sums.buckets:
            raise RuntimeError("broken")

    def reduce() -> list[int]:
        first = len(sent)
        reduction.reduce(
            sums, 0, Pair(), wait, before=lambda bucket: None, done=lambda count: None, broken=lambda left: None
        )
        return [total.data_ptr() for total in sent[first:]]

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    sums = sums_of_a_step()
    before = reduce()
    with pytest.raises(RuntimeError, match="broken"):
        reduce()
    again = [total.data_ptr() for total in sent[sums.buckets :]]
    assert set(again) <= set(before)
    given_up = {total.data_ptr() for total in sent[-reduction.IN_FLIGHT :]}
    assert not given_up & set(reduce())
