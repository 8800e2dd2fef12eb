"""Accumulators and buckets: the sum is the same whatever is lost, and in whatever order it is computed again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron.errors import NonFiniteValue
from unicron.gradients import fixed_point
from unicron.gradients.accumulators import Accumulator, InPlaceAccumulator, SeparateAccumulator
from unicron.gradients.buckets import bucket_slices
from unicron.gradients.exchange import Exchange
from unicron.gradients.fixed_point import FixedPointAccumulator
from unicron.gradients.spans import memory_order, spans
from unicron.protocol import environment

SIZES = [5, 1, 7]
MICRO_BATCHES = 6

examples = settings(deadline=None, derandomize=True)

Make = Callable[[], Accumulator]

values = st.floats(-(2.0**20), 2.0**20, width=32)
"""float32 numbers in a range, also subnormal ones."""


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set buckets of four float32 numbers: some end within a tensor, some span tensors."""
    monkeypatch.setenv(environment.BUCKET_BYTES, "16")


@examples
@given(st.lists(st.integers(0, 20)), st.integers(1, 12))
def test_buckets_cover_every_element_once_in_order(sizes: list[int], elements: int) -> None:
    buckets = bucket_slices(sizes, elements)
    found = [(tensor, i) for bucket in buckets for tensor, start, end in bucket for i in range(start, end)]
    assert found == [(tensor, i) for tensor, size in enumerate(sizes) for i in range(size)]
    lengths = [sum(end - start for _, start, end in bucket) for bucket in buckets]
    assert all(length == elements for length in lengths[:-1])
    assert all(0 < length <= elements for length in lengths[-1:])


@examples
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=8))
def test_spans_have_the_elements_of_their_views_in_order(ranges: list[tuple[int, int]]) -> None:
    """The views follow one another in memory with gaps between some of them: one span for each gap."""
    memory, views, start = torch.arange(60.0), [], 0
    for gap, size in ranges:
        start += gap
        views.append(memory[start : start + size])
        start += size
    found = spans(views)
    assert len(found) == sum(gap > 0 or i == 0 for i, (gap, _) in enumerate(ranges))
    assert [x for span in found for x in span.tolist()] == [x for view in views for x in view.tolist()]


def test_gradients_that_lie_in_one_buffer_are_reduced_as_one_tensor_for_each_bucket() -> None:
    memory, apart = torch.arange(16.0), torch.zeros(2, 4)
    # As Megatron has them: the last parameter comes first.
    gradients = [memory[10:16].view(2, 3), memory[8:10], memory[:8].view(4, 2), apart]
    order = memory_order(gradients)
    assert order == [2, 1, 0, 3]
    sums = InPlaceAccumulator([gradients[i] for i in order])
    assert [len(views) for views in sums.buffers] == [1] * 6
    assert torch.equal(torch.cat([sums.load(bucket) for bucket in range(4)]), memory)
    sums.store(1, torch.full((4,), 7.0))
    assert memory[3:9].tolist() == [3.0, *[7.0] * 4, 8.0]


def buffers() -> list[torch.Tensor]:
    return [torch.zeros(size) for size in SIZES]


def backward(sums: Accumulator, seed: int) -> None:
    """Stand in for a backward pass: add the gradients of a micro-batch to the buffers."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in sums.tensors:
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 10.0 ** (seed % 5 - 3))


def total(ranks: Sequence[Accumulator], first: int) -> None:
    """Stand in for an all-reduce over the ranks, in the given order."""
    for bucket in range(first, ranks[0].buckets):
        loaded = [rank.load(bucket) for rank in ranks]
        added = loaded[0].clone()
        for other in loaded[1:]:
            added += other
        for rank in ranks:
            rank.store(bucket, added)


def result(sums: Accumulator) -> torch.Tensor:
    sums.finish()
    return torch.cat([tensor.view(-1) for tensor in sums.tensors])


def exact() -> FixedPointAccumulator:
    return FixedPointAccumulator(buffers(), micro_batches=MICRO_BATCHES)


def apart() -> SeparateAccumulator:
    return SeparateAccumulator(buffers())


def in_place() -> InPlaceAccumulator:
    return InPlaceAccumulator(buffers())


def failure_free(make: Make) -> torch.Tensor:
    sums = make()
    for k in range(MICRO_BATCHES):
        backward(sums, k)
        sums.add(0)
    return result(sums)


@examples
@given(st.lists(values, min_size=1, max_size=MICRO_BATCHES), st.randoms(use_true_random=False), st.integers(1, 4))
def test_exact_sums_do_not_depend_on_order_or_owner(numbers: list[float], rng: random.Random, ranks: int) -> None:
    def summed(numbers: list[float], owners: list[int]) -> torch.Tensor:
        parts = [FixedPointAccumulator([torch.zeros(1)], micro_batches=MICRO_BATCHES) for _ in range(ranks)]
        for number, owner in zip(numbers, owners, strict=True):
            parts[owner].tensors[0].fill_(number)
            parts[owner].add(0)
        rng.shuffle(parts)
        total(parts, 0)
        return result(parts[0])

    one = summed(numbers, [0] * len(numbers))
    other = numbers[:]
    rng.shuffle(other)
    assert torch.equal(one, summed(other, [rng.randrange(ranks) for _ in other]))


@examples
@given(st.lists(values, min_size=1, max_size=MICRO_BATCHES))
def test_exact_sums_round_each_number_once(numbers: list[float]) -> None:
    sums = FixedPointAccumulator([torch.zeros(1)], micro_batches=MICRO_BATCHES)
    for number in numbers:
        sums.tensors[0].fill_(number)
        sums.add(0)
    high, low = sums.load(0)[:, 0].tolist()
    true = sum(map(Fraction, numbers))
    small = sum(0 < abs(number) < 2.0**-41 for number in numbers)
    # float32 numbers of 2**-41 and more are represented exactly; others to within half of the fine grid.
    assert abs(Fraction(high) + Fraction(low) - true) <= small * Fraction(2) ** -65
    # Rounded to float64 and from there to float32.
    assert float(result(sums)) == pytest.approx(float(true), rel=2.0**-23, abs=MICRO_BATCHES * 2.0**-65)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), fixed_point.RANGE])
def test_values_beyond_exact_sums_are_refused_before_they_are_added(value: float) -> None:
    sums = exact()
    backward(sums, 0)
    sums.add(0)
    before = [sums.load(bucket) for bucket in range(sums.buckets)]
    sums.tensors[2][3] = value
    with pytest.raises(NonFiniteValue, match="exact mode takes values up to"):
        sums.add(0)
    assert all(torch.equal(sums.load(b), total) for b, total in enumerate(before))


def test_exact_sums_represent_the_largest_accepted_value() -> None:
    sums = exact()
    largest = float(torch.tensor(sums.limit).nextafter(torch.tensor(0.0)))
    for _ in range(2 * MICRO_BATCHES):
        sums.tensors[0].fill_(largest)
        sums.add(0)
    assert float(sums.load(0)[0, 0]) == 2 * MICRO_BATCHES * largest


def test_too_many_micro_batches_for_exact_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="adds up to 8192 micro-batches"):
        FixedPointAccumulator(buffers(), micro_batches=8193)


@pytest.mark.parametrize("kind", [InPlaceAccumulator, SeparateAccumulator])
def test_a_gradient_that_is_not_finite_is_found_before_it_is_reduced(
    kind: type[InPlaceAccumulator] | type[SeparateAccumulator],
) -> None:
    sums = kind(buffers())
    sums.tensors[2][6] = float("nan")
    sums.add(0)
    sums.check_finite(sums.buckets)
    with pytest.raises(NonFiniteValue):
        sums.check_finite(0)
    large = kind([torch.full((3,), 3e38)])
    large.add(0)
    large.check_finite(0)  # the sum overflows, no element does


@pytest.mark.parametrize("make", [apart, exact])
def test_a_half_done_backward_pass_leaves_no_trace(make: Make) -> None:
    sums = make()
    for k in range(MICRO_BATCHES):
        sums.tensors[1].fill_(77.0)
        assert sums.rewind()
        backward(sums, k)
        sums.add(0)
    assert torch.equal(result(sums), failure_free(make))


def test_sums_in_place_cannot_rewind_a_half_done_backward_pass() -> None:
    assert not in_place().rewind()


@examples
@given(st.integers(0, 7), st.randoms(use_true_random=False))
@pytest.mark.parametrize("make", [in_place, apart, exact])
def test_reduced_buckets_are_kept_and_the_rest_is_computed_again(make: Make, reduced: int, rng: random.Random) -> None:
    """One of three ranks is lost after some buckets are reduced; the two others compute its micro-batches again."""
    ranks = [make() for _ in range(3)]
    owner = [rng.randrange(3) for _ in range(MICRO_BATCHES)]
    for k in range(MICRO_BATCHES):
        backward(ranks[owner[k]], k)
        ranks[owner[k]].add(0)
    reduced = min(reduced, ranks[0].buckets)
    for bucket in range(reduced):
        added = ranks[0].load(bucket) + ranks[1].load(bucket) + ranks[2].load(bucket)
        for rank in ranks:
            rank.store(bucket, added)
    survivors = ranks[:2]
    for rank in survivors:
        rank.keep(reduced)
    for k in range(MICRO_BATCHES):
        if owner[k] == 2:
            helper = rng.choice(survivors)
            backward(helper, k)
            helper.add(reduced)
    total(survivors, reduced)
    one, other = result(survivors[0]), result(survivors[1])
    assert torch.equal(one, other)
    expected = failure_free(make)
    if make is exact:
        assert torch.equal(one, expected)
    else:
        assert torch.allclose(one, expected, rtol=1e-5, atol=1e-6)
    # The totals can be read twice: an update that was not applied is repeated.
    assert torch.equal(one, result(survivors[0]))
    survivors[0].clear()
    assert not result(survivors[0]).any()


def test_both_uses_of_a_tied_weight_add_up_the_same_on_one_stage_and_on_two() -> None:
    def whole(k: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(k)
        return torch.randn(7, generator=generator), torch.randn(7, generator=generator) * 1e-3

    def stage(*sizes: int, tied: int) -> FixedPointAccumulator:
        tensors = [torch.zeros(size) for size in sizes]
        exchange = Exchange((tied,), lambda: "stages", 2)
        return FixedPointAccumulator(tensors, micro_batches=MICRO_BATCHES, exchanges=[exchange])

    leaf = torch.zeros(7)
    one = FixedPointAccumulator(buffers(), micro_batches=MICRO_BATCHES, leaves=[(2, leaf)])
    first, last = stage(7, 2, tied=0), stage(9, 7, tied=1)
    for k in range(MICRO_BATCHES):
        embedding, output = whole(k)
        one.tensors[2].add_(embedding)
        leaf.add_(output)
        first.tensors[0].add_(embedding)
        last.tensors[1].add_(output)
        for sums in (one, first, last):
            sums.add(0)
    sent: list[torch.Tensor] = []

    def exchange(both: torch.Tensor, group: object) -> None:
        sent.append(both.clone())
        for other in sent[:-1]:
            both.add_(other)

    first.finish(exchange)
    last.finish(exchange)
    del sent[0]
    first.finish(exchange)
    one.finish()
    assert torch.equal(one.tensors[2], first.tensors[0])
    assert torch.equal(one.tensors[2], last.tensors[1])


EXCHANGES = [Exchange((0, 2), lambda: "heads", 4), Exchange((1,), lambda: "stages", 2)]


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: InPlaceAccumulator(buffers(), EXCHANGES),
        lambda: SeparateAccumulator(buffers(), exchanges=EXCHANGES),
        lambda: FixedPointAccumulator(buffers(), micro_batches=MICRO_BATCHES, exchanges=EXCHANGES),
    ],
)
def test_an_exchange_can_break_and_be_repeated(make: Make, kept: int) -> None:
    """What the exchanges bring is in the buffers; a later generation still gets the totals from before them."""
    sums = make()
    backward(sums, 0)
    sums.add(0)
    totals = [sums.load(bucket) for bucket in range(sums.buckets)]
    sums.keep(kept)
    sums.finish()
    expected = [tensor * factor for tensor, factor in zip(sums.tensors, (4, 2, 4), strict=True)]
    left = 0

    def all_reduce(total: torch.Tensor, group: object) -> None:
        nonlocal left
        total *= 4 if group == "heads" else 2
        left -= 1
        if left < 0:
            raise RuntimeError("broken")

    for left in (0, 1, 2, 0, 2):
        with contextlib.suppress(RuntimeError) if left < 2 else contextlib.nullcontext():
            sums.finish(all_reduce)
            assert all(map(torch.equal, sums.tensors, expected))
        assert all(torch.equal(sums.load(bucket), total) for bucket, total in enumerate(totals))
    for bucket, total in enumerate(totals):
        sums.store(bucket, total)
    sums.finish()
    assert all(torch.equal(tensor * 4, other) for tensor, other in zip(sums.tensors[::2], expected[::2], strict=True))
    sums.clear()
    assert not result(sums).any()


def test_exact_sums_leave_room_for_each_rank_that_exchanges() -> None:
    with pytest.raises(ValueError, match="adds up to 4096 micro-batches"):
        FixedPointAccumulator(buffers(), micro_batches=4097, exchanges=EXCHANGES)
