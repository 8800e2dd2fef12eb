"""The agreement at the end of a step: every rank gets the same account, request and statuses, or the same error."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from unicron.accounting import PartialStep
from unicron.errors import SampleAccountingError
from unicron.training.end_of_step import Agreement, EndOfStep, Member

MICRO_BATCHES = 4


class Ranks:
    """Ranks of one generation, each a thread."""

    def __init__(self, replicas: int, shards: int, chunks: int = 1) -> None:
        places = [Member(replicas, shards, shard, shards - 1, chunks) for shard in range(shards)]
        self.places = places * replicas
        self.sums = 0
        """Sums over all ranks so far."""
        self._barrier = threading.Barrier(len(self.places))
        self._sent: list[torch.Tensor] = []
        self._ends = [EndOfStep(place, self._total) for place in self.places]

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        if self._barrier.wait() == 0:
            self._sent, self.sums = [], self.sums + 1
        self._barrier.wait()
        self._sent.append(values)
        self._barrier.wait()
        return torch.stack(self._sent).sum(0)

    def agree(self, partials: list[PartialStep], request: Callable[[int], int] = lambda rank: 0) -> list[Agreement]:
        """Let every rank agree on its partial step; return what each got."""
        with ThreadPoolExecutor(len(partials)) as pool:
            found = [
                pool.submit(end.agree, partial, buckets=1, request=request(rank), statuses=(rank % 3, 2))
                for rank, (end, partial) in enumerate(zip(self._ends, partials, strict=True))
            ]
        return [one.result() for one in found]


def partials(places: list[Member], samples: Mapping[int, list[int]], step: int = 1) -> list[PartialStep]:
    """Return partial steps in which replica r has computed the micro-batches k with k % replicas == r."""
    made = []
    for rank, place in enumerate(places):
        own = {k: ids for k, ids in samples.items() if k % place.replicas == rank // place.shards}
        losses = {k: 0.1 * step + k for k in own} if place.shard == place.reporting else {}
        done = [set(own) for _ in range(place.chunks)]
        made.append(PartialStep(step, list(own), MICRO_BATCHES, samples=own, losses=losses, done=done))
    return made


@pytest.mark.parametrize(("replicas", "shards", "chunks"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 40, 1), (2, 2, 20)])
def test_all_ranks_agree_whatever_the_number_of_samples_is(replicas: int, shards: int, chunks: int) -> None:
    ranks = Ranks(replicas, shards, chunks)
    sums = 0
    # As many, more, fewer, different numbers and none: only where there is no room for the ids is there a second sum.
    for step, (sizes, expected_sums) in enumerate(
        [((2, 2, 2, 2), 2), ((2, 2, 2, 2), 1), ((3, 1, 0, 2), 2), ((0, 3, 3, 1), 1), ((0, 0, 0, 0), 1)], start=1
    ):
        samples = {k: [2**53 - 1 - 10 * k - i for i in range(size)] for k, size in enumerate(sizes)}
        made = partials(ranks.places, samples, step)
        agreements = ranks.agree(made, request=lambda rank: 3 * (rank == len(made) - 1))  # noqa: B023
        assert set(map(str, agreements)) == {str(Agreement(3, [min(2, len(made) - 1), 2]))}
        accounts = [partial.account for partial in made]
        assert all(account == accounts[0] for account in accounts)
        assert accounts[0] is not None
        assert accounts[0].sample_ids == [i for k in range(MICRO_BATCHES) for i in samples[k]]
        assert accounts[0].loss == pytest.approx(0.1 * step + 1.5, rel=1e-15)
        sums += expected_sums
        assert ranks.sums == sums


def test_a_step_whose_account_is_known_counts_micro_batches_only() -> None:
    ranks = Ranks(2, 2)
    made = partials(ranks.places, {k: [k] for k in range(MICRO_BATCHES)})
    ranks.agree(made)
    for partial in made:
        partial.losses = {}  # of the micro-batches of a lost rank nobody knows them any more
    ranks.agree(made)
    made[0].done[0].clear()
    made[0].reduced = made[2].reduced = 1  # in that shard every bucket is reduced
    ranks.agree(made)
    made[0].reduced = made[2].reduced = 0
    with pytest.raises(SampleAccountingError, match=r"\{0: 0, 2: 0\}"):
        ranks.agree(made)


@pytest.mark.parametrize(("shard", "chunk"), list(itertools.product(range(3), range(2))))
def test_each_chunk_of_each_shard_has_to_count_every_micro_batch_once(shard: int, chunk: int) -> None:
    ranks = Ranks(2, 3, chunks=2)
    made = partials(ranks.places, {k: [k] for k in range(MICRO_BATCHES)})
    one, other = (made[rank] for rank, place in enumerate(ranks.places) if place.shard == shard)
    one.done[chunk].remove(0)
    other.done[chunk].add(0)
    other.samples[0], other.losses = [0], dict.fromkeys(other.losses | {0: 1.0}, 1.0)
    ranks.agree(made)  # another rank may have computed it
    ranks = Ranks(2, 3, chunks=2)
    made = partials(ranks.places, {k: [k] for k in range(MICRO_BATCHES)})
    one, other = (made[rank] for rank, place in enumerate(ranks.places) if place.shard == shard)
    one.done[chunk].remove(0)
    other.done[chunk].add(2)
    other.samples[2], other.losses = [2], dict.fromkeys(other.losses | {2: 1.0}, 1.0)
    with pytest.raises(SampleAccountingError, match=r"\{0: 0, 2: 2\}"):
        ranks.agree(made)
