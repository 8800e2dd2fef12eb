"""Transfer plans, for any two ways in which the ranks divide the state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unicron.state.boxes import Box, boxes_of, view_of_box
from unicron.state.chunks import ParameterShard, StateChunk, required_chunks, state_kinds
from unicron.state.transfer_plan import Transfer, newest_complete, plan_transfers, rounds, split

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


def numbered(shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor whose elements are all different."""
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(tuple(shape))


@st.composite
def any_chunk(draw: st.DrawFn, shape: tuple[int, ...], key: str = "parameter/w") -> StateChunk:
    """Draw a chunk of a tensor: a shard, or a flat range of a shard."""
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    size: int = math.prod(extent)
    start = draw(st.integers(0, size - 1))
    stop = draw(st.integers(start + 1, size))
    return StateChunk(key, shape, offset, extent, start, stop, "float32")


def values_of(chunk: StateChunk, full: torch.Tensor) -> torch.Tensor:
    """Return the values of a chunk."""
    shard = full[tuple(slice(o, o + n) for o, n in zip(chunk.offset, chunk.shape, strict=True))]
    return shard.clone() if chunk.is_whole else shard.reshape(-1)[chunk.start : chunk.stop].clone()


@given(shapes.flatmap(any_chunk))
def test_the_boxes_of_a_chunk_make_up_its_range(chunk: StateChunk) -> None:
    full = numbered(chunk.global_shape)
    available = values_of(chunk, full)
    assert torch.equal(
        torch.cat([view_of_box(chunk, available, box).reshape(-1) for box, _ in boxes_of(chunk)]), available.reshape(-1)
    )
    for box, _ in boxes_of(chunk):
        offset, shape = box
        expected = full[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        assert torch.equal(view_of_box(chunk, available, box), expected)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[list[StateChunk]], list[list[tuple[StateChunk, int]]], list[str]]:
    shape = draw(shapes)
    ranks = draw(st.integers(1, 4))
    some = st.lists(any_chunk(shape), max_size=3)
    wanted = [draw(some) for _ in range(ranks)]
    available = [[(chunk, draw(st.integers(0, 1))) for chunk in draw(some)] for _ in range(ranks)]
    return wanted, available, [draw(st.sampled_from("ab")) for _ in range(ranks)]


@given(worlds())
def test_a_plan_brings_everything_or_there_is_none(
    world: tuple[list[list[StateChunk]], list[list[tuple[StateChunk, int]]], list[str]],
) -> None:
    wanted, available, nodes = world
    transfers = plan_transfers(wanted, available, 1, nodes)
    shape = next((p.global_shape for listed in wanted for p in listed), ())
    full = numbered(shape)
    if transfers is None:
        present = torch.zeros(shape, dtype=torch.bool)
        for chunk, version in (item for listed in available for item in listed):
            for (offset, extent), _ in boxes_of(chunk) if version == 1 else ():
                present[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))] = True
        missing = [
            not bool(present[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].all())
            for listed in wanted
            for chunk in listed
            for box, _ in boxes_of(chunk)
        ]
        assert any(missing)
        return
    written = [[torch.full_like(values_of(chunk, full), -1.0) for chunk in listed] for listed in wanted]
    for transfer in transfers:
        chunk, version = available[transfer.sender][transfer.given]
        assert version == 1
        given = view_of_box(chunk, values_of(chunk, full), transfer.box)
        receiver, required = transfer.receiver, transfer.required
        target = view_of_box(wanted[receiver][required], written[receiver][required], transfer.box)
        assert bool((target == -1.0).all())  # each element once
        target.copy_(given)
        assert transfer.bytes == given.numel() * 4
    for chunks, arrays in zip(wanted, written, strict=True):
        for chunk, array in zip(chunks, arrays, strict=True):
            assert torch.equal(array, values_of(chunk, full))


@given(worlds(), st.integers(1, 64))
def test_rounds_are_bounded_and_complete(
    world: tuple[list[list[StateChunk]], list[list[tuple[StateChunk, int]]], list[str]], limit: int
) -> None:
    wanted, available, nodes = world
    transfers = plan_transfers(wanted, available, 1, nodes) or []
    dealt = rounds(transfers, limit)
    between = [m for m in transfers if m.sender != m.receiver]
    assert sum(m.bytes for ms in dealt for m in ms) == sum(m.bytes for m in between)
    for ms in dealt:
        for pair in {(m.sender, m.receiver) for m in ms}:
            assert sum(m.bytes for m in ms if (m.sender, m.receiver) == pair) < 2 * max(limit, 4)


def whole_chunk(key: str, shape: tuple[int, ...] = (8,), start: int = 0, stop: int = 8) -> StateChunk:
    return StateChunk(key, shape, (0,) * len(shape), shape, start, stop, "float32")


def test_the_nearest_rank_sends_and_senders_share_the_load() -> None:
    chunk = whole_chunk("parameter/w")
    transfers = plan_transfers(
        [[chunk]] * 5, [[(chunk, 3)], [(chunk, 3)], [(chunk, 3)], [], []], 3, ["a", "b", "b", "b", "b"]
    )
    assert transfers is not None
    assert [(m.sender, m.receiver) for m in transfers] == [(0, 0), (1, 1), (2, 2), (1, 3), (2, 4)]


def shard(start: int, stop: int) -> ParameterShard:
    return ParameterShard("w", (8,), (0,), (8,), "float32", start, stop, stop > start)


def test_the_newest_complete_version_is_agreed_on() -> None:
    """Two of three ranks divide the optimizer's state; if one of them is lost, only the snapshots are complete."""

    def half(start: int, stop: int, version: int) -> list[tuple[StateChunk, int]]:
        keys = ("optimizer/w/exp_avg",)
        return [(whole_chunk("parameter/w"), version)] + [
            (whole_chunk(key, start=start, stop=stop), version) for key in keys
        ]

    sole = [[shard(0, 8)]]
    assert newest_complete(sole, [half(0, 4, 5)], distributed=True) is None
    snapshots = half(0, 4, 4) + half(4, 8, 4)
    agreed = newest_complete(sole, [half(0, 4, 5) + snapshots], distributed=True)
    assert agreed is not None
    assert agreed.version == 4
    assert [chunk.key for chunk in agreed.required[0]] == ["parameter/w", "optimizer/w/exp_avg"]
    both = newest_complete([[shard(0, 4)], [shard(4, 8)]], [half(0, 4, 5) + snapshots, half(4, 8, 5)], distributed=True)
    assert both is not None
    assert both.version == 5


def test_optimizer_state_that_only_a_lost_rank_had_is_missed() -> None:
    """All state of a parameter was on the lost rank; other parameters show which kinds of state the optimizer keeps."""
    other = ParameterShard("v", (8,), (0,), (8,), "float32", 0, 8, True)
    available = [
        whole_chunk("parameter/w"),
        whole_chunk("parameter/v"),
        whole_chunk("optimizer/v/exp_avg"),
        whole_chunk("optimizer/v/step", (), 0, 1),
    ]
    assert newest_complete([[shard(0, 8), other]], [[(chunk, 2) for chunk in available]], distributed=True) is None
    assert state_kinds(available, distributed=True)["w"] == {"exp_avg": (None, "float32"), "step": ((), "float32")}
    replicated = required_chunks([shard(0, 8), other], state_kinds(available, distributed=False))
    assert [chunk.key for chunk in replicated] == [
        "parameter/w", "parameter/v", "optimizer/v/exp_avg", "optimizer/v/step",
    ]  # fmt: skip


def test_no_rank_has_a_state() -> None:
    assert newest_complete([[shard(0, 8)]], [[]], distributed=False) is None
    assert rounds([Transfer(0, 0, 0, 0, Box((0,), (8,)), 32)], 8) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=3), st.integers(1, 64))
def test_the_parts_of_a_split_transfer_are_its_box_each_element_once(axes: list[tuple[int, int]], limit: int) -> None:
    offset, shape = tuple(o for o, _ in axes), tuple(n for _, n in axes)
    whole = Transfer(1, 2, 3, 4, Box(offset, shape), 4 * math.prod(shape))
    counts = torch.zeros(tuple(o + n for o, n in axes), dtype=torch.int64)
    for part in split(whole, limit):
        assert part[:4] == whole[:4]
        assert part.bytes == 4 * math.prod(part.box.shape)
        assert part.bytes <= max(limit, 4)
        assert all(o + n <= end for o, n, end in zip(*part.box, counts.shape, strict=True))
        counts[tuple(slice(o, o + n) for o, n in zip(*part.box, strict=True))] += 1
    expected = torch.zeros_like(counts)
    expected[tuple(slice(o, o + n) for o, n in axes)] = 1
    assert torch.equal(counts, expected)


def test_the_newest_version_wins_and_the_node_decides_who_gives() -> None:
    chunk = whole_chunk("parameter/w")
    owners = [[(chunk, 3), (chunk, 4)], [(chunk, 3), (chunk, 4)], []]
    plan = newest_complete([[], [], [shard(0, 0)]], owners, distributed=False, nodes=["a", "b", "b"])
    assert plan is not None
    assert plan.version == 4
    assert [(one.sender, one.given, one.receiver, one.required) for one in plan.transfers] == [(1, 1, 2, 0)]


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 2), (2, 3, 2), (3, 1, 2)])
def test_the_boxes_of_every_range_are_the_range_in_order(shape: tuple[int, ...]) -> None:
    full = numbered(shape)
    size: int = math.prod(shape)
    for start in range(size):
        for stop in range(start + 1, size + 1):
            chunk = StateChunk("parameter/w", shape, (0,) * len(shape), shape, start, stop, "float32")
            found: list[torch.Tensor] = []
            begins: list[bool] = []
            for box, begin in boxes_of(chunk):
                begins.append(begin == sum(part.numel() for part in found))
                found.append(full[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1))
            assert all(begins)
            assert torch.equal(torch.cat(found), full.reshape(-1)[start:stop])


def test_the_load_of_earlier_chunks_counts() -> None:
    """Of two owners the one that has given least so far gives, over all chunks; what a rank keeps does not count."""
    chunks = [whole_chunk(f"parameter/{name}") for name in "abc"]
    owned = [(chunk, 1) for chunk in chunks]
    transfers = plan_transfers([chunks, [], chunks], [owned, owned, []], 1)
    assert transfers is not None
    assert [(one.sender, one.receiver) for one in transfers] == [(0, 0)] * 3 + [(0, 2), (1, 2), (0, 2)]


def test_each_pair_of_ranks_has_a_limit_of_its_own() -> None:
    def transfer(sender: int, receiver: int) -> Transfer:
        return Transfer(sender, 0, receiver, 0, Box((0,), (4,)), 16)

    transfers = [transfer(0, 1), transfer(0, 2), transfer(0, 1), transfer(1, 0)]
    dealt = rounds(transfers, 16)
    assert [[(one.sender, one.receiver) for one in each] for each in dealt] == [[(0, 1), (0, 2), (1, 0)], [(0, 1)]]
