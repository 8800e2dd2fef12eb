"""The order of the data loader ``cyclic``: a function of position and of the replicas that the task began with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.launch import check
from unicron.megatron_lm.samples import BatchSizes, CyclicOrder, most_replicas

orders = st.tuples(st.integers(8, 60), st.integers(1, 3), st.integers(1, 4)).filter(lambda o: o[0] >= o[1] * o[2])


@given(orders, st.integers(0, 3))
def test_each_epoch_reads_each_sample_of_whole_rows_once(order: tuple[int, int, int], epoch: int) -> None:
    total, size, replicas = order
    used = total - total % (size * replicas)
    made = CyclicOrder(total, size, replicas)
    read = [i for start in range(epoch * used, (epoch + 1) * used, size) for i in made.samples(start)]
    assert sorted(read) == list(range(used))


@given(orders, st.integers(0, 40))
def test_a_micro_batch_is_the_same_in_whichever_order_they_are_asked_for(order: tuple[int, int, int], k: int) -> None:
    total, size, replicas = order
    asked = CyclicOrder(total, size, replicas)
    asked.samples(0)
    asked.samples(7 * size * total)
    assert asked.samples(k * size) == CyclicOrder(total, size, replicas).samples(k * size)


def test_the_samples_of_a_replica_are_those_of_stock() -> None:
    """As ``MegatronPretrainingRandomSampler`` of core 0.16.1 draws them: 3 replicas of 21 samples, epoch 1, rank 2."""
    drawn = torch.randperm(6, generator=torch.Generator().manual_seed(1)).tolist()
    order = CyclicOrder(21, 2, 3)
    first = 18 + 2 * 2  # behind an epoch of 18 samples, and behind the micro-batches of ranks 0 and 1
    assert order.samples(first) == [12 + i for i in drawn[:2]]
    assert order.samples(first + 6) == [12 + i for i in drawn[2:4]]


@pytest.mark.usefixtures("megatron")
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.integers(1, 90), st.integers(0, 120))
def test_batches_are_those_of_stock(first: int, increment: int, increments: int, during: int, before: int) -> None:
    """As ``RampupBatchsizeNumMicroBatchesCalculator`` and ``update_train_iters`` of core 0.16.1 compute them."""
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    full, samples = first + increment * increments, 300
    ramped = BatchSizes(full, [str(first), str(increment), str(during)])
    stock = (
        RampupBatchsizeNumMicroBatchesCalculator(full, 1, 1, False, 0, first, increment, during) if increments else None
    )
    consumed, steps, expected = 0, 0, []
    while consumed <= during:
        if stock is not None:
            stock.update(consumed, consistency_check=False)
        batch = stock.num_micro_batches if stock is not None else full
        expected.append((consumed, batch))
        steps, consumed = steps + 1, consumed + batch
    assert [(consumed, ramped.batch(consumed)) for consumed, _ in expected] == expected
    assert [ramped.consumed(0, i) for i in range(len(expected))] == [consumed for consumed, _ in expected]
    assert ramped.consumed(0, steps + 3) == consumed + 3 * full
    planned = {"global_batch_size": full, "train_samples": samples, "rampup_batch_size": [first, increment, during]}
    assert ramped.steps(samples) == check._planned(planned)["steps"] == steps + (samples - consumed) // full
    assert all(batch % ramped.divisor == 0 for _, batch in expected)
    own = ramped.batch(before)
    assert ramped.consumed(before, 1) == before + own


@pytest.mark.parametrize(("micro_batches", "replicas", "most"), [(12, 3, 3), (8, 3, 2), (7, 3, 1), (4, 8, 4)])
def test_an_order_is_dealt_to_as_many_replicas_as_divide_the_step(micro_batches: int, replicas: int, most: int) -> None:
    assert most_replicas(micro_batches, replicas) == most
