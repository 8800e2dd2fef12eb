"""Plans of moves, over any two ways in which ranks cut a state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from unicron.movement import rounds
from unicron.moves import Move, boxes, newest, plan_moves, region
from unicron.pieces import Piece, Shard, kinds, needed

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


def numbered(shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of which every element is different."""
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(tuple(shape))


@st.composite
def held_pieces(draw: st.DrawFn, shape: tuple[int, ...], key: str = "parameter/w") -> Piece:
    """Any piece of a tensor: a shard of it, whole or a range."""
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    size: int = math.prod(extent)
    start = draw(st.integers(0, size - 1))
    stop = draw(st.integers(start + 1, size))
    return Piece(key, shape, offset, extent, start, stop, "float32")


def values_of(piece: Piece, full: torch.Tensor) -> torch.Tensor:
    """Return what a piece of a tensor holds."""
    shard = full[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))]
    return shard.clone() if piece.whole else shard.reshape(-1)[piece.start : piece.stop].clone()


@given(shapes.flatmap(held_pieces))
def test_boxes_are_the_range(piece: Piece) -> None:
    full = numbered(piece.global_shape)
    held = values_of(piece, full)
    assert torch.equal(torch.cat([region(piece, held, *box).reshape(-1) for box, _ in boxes(piece)]), held.reshape(-1))
    for (offset, shape), _ in boxes(piece):
        expected = full[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        assert torch.equal(region(piece, held, offset, shape), expected)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[list[Piece]], list[list[tuple[Piece, int]]], list[str]]:
    shape = draw(shapes)
    ranks = draw(st.integers(1, 4))
    some = st.lists(held_pieces(shape), max_size=3)
    wanted = [draw(some) for _ in range(ranks)]
    held = [[(piece, draw(st.integers(0, 1))) for piece in draw(some)] for _ in range(ranks)]
    return wanted, held, [draw(st.sampled_from("ab")) for _ in range(ranks)]


@given(worlds())
def test_a_plan_brings_everything_or_there_is_none(
    world: tuple[list[list[Piece]], list[list[tuple[Piece, int]]], list[str]],
) -> None:
    wanted, held, nodes = world
    moves = plan_moves(wanted, held, 1, nodes)
    shape = next((p.global_shape for listed in wanted for p in listed), ())
    full = numbered(shape)
    if moves is None:
        present = torch.zeros(shape, dtype=torch.bool)
        for piece, version in (item for listed in held for item in listed):
            for (offset, extent), _ in boxes(piece) if version == 1 else ():
                present[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))] = True
        missing = [
            not bool(present[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].all())
            for listed in wanted
            for piece in listed
            for box, _ in boxes(piece)
        ]
        assert any(missing)
        return
    written = [[torch.full_like(values_of(piece, full), -1.0) for piece in listed] for listed in wanted]
    for move in moves:
        piece, version = held[move.source][move.held]
        assert version == 1
        given = region(piece, values_of(piece, full), move.offset, move.shape)
        taken = region(wanted[move.taker][move.needed], written[move.taker][move.needed], move.offset, move.shape)
        assert bool((taken == -1.0).all())  # each element once
        taken.copy_(given)
        assert move.bytes == given.numel() * 4
    for pieces, arrays in zip(wanted, written, strict=True):
        for piece, array in zip(pieces, arrays, strict=True):
            assert torch.equal(array, values_of(piece, full))


@given(worlds(), st.integers(1, 64))
def test_rounds_are_bounded_and_complete(
    world: tuple[list[list[Piece]], list[list[tuple[Piece, int]]], list[str]], limit: int
) -> None:
    wanted, held, nodes = world
    moves = plan_moves(wanted, held, 1, nodes) or []
    dealt = rounds(moves, limit)
    between = [m for m in moves if m.source != m.taker]
    assert sum(m.bytes for ms in dealt for m in ms) == sum(m.bytes for m in between)
    for ms in dealt:
        for pair in {(m.source, m.taker) for m in ms}:
            assert sum(m.bytes for m in ms if (m.source, m.taker) == pair) < 2 * max(limit, 4)


def whole(key: str, shape: tuple[int, ...] = (8,), start: int = 0, stop: int = 8) -> Piece:
    return Piece(key, shape, (0,) * len(shape), shape, start, stop, "float32")


def test_the_nearest_gives_and_the_load_is_shared() -> None:
    piece = whole("parameter/w")
    moves = plan_moves([[piece]] * 5, [[(piece, 3)], [(piece, 3)], [(piece, 3)], [], []], 3, ["a", "b", "b", "b", "b"])
    assert moves is not None
    assert [(m.source, m.taker) for m in moves] == [(0, 0), (1, 1), (2, 2), (1, 3), (2, 4)]


def shard(start: int, stop: int) -> Shard:
    return Shard("w", (8,), (0,), (8,), "float32", start, stop, stop > start)


def test_the_newest_step_that_is_held_in_full_wins() -> None:
    """Two ranks of three divide the optimizer's state; with one of them gone, only what a copy holds is complete."""

    def half(start: int, stop: int, version: int) -> list[tuple[Piece, int]]:
        keys = ("optimizer/w/exp_avg",)
        return [(whole("parameter/w"), version)] + [(whole(key, start=start, stop=stop), version) for key in keys]

    sole = [[shard(0, 8)]]
    assert newest(sole, [half(0, 4, 5)], sharded=True) is None
    copies = half(0, 4, 4) + half(4, 8, 4)
    agreed = newest(sole, [half(0, 4, 5) + copies], sharded=True)
    assert agreed is not None
    assert agreed.version == 4
    assert [piece.key for piece in agreed.needed[0]] == ["parameter/w", "optimizer/w/exp_avg"]
    both = newest([[shard(0, 4)], [shard(4, 8)]], [half(0, 4, 5) + copies, half(4, 8, 5)], sharded=True)
    assert both is not None
    assert both.version == 5


def test_a_state_that_only_a_lost_rank_held_is_missed() -> None:
    """The parameter is all on one rank; the others know from their own parameters what its state would be."""
    other = Shard("v", (8,), (0,), (8,), "float32", 0, 8, True)
    held = [
        whole("parameter/w"),
        whole("parameter/v"),
        whole("optimizer/v/exp_avg"),
        whole("optimizer/v/step", (), 0, 1),
    ]
    assert newest([[shard(0, 8), other]], [[(piece, 2) for piece in held]], sharded=True) is None
    assert kinds(held, sharded=True)["w"] == {"exp_avg": (None, "float32"), "step": ((), "float32")}
    replicated = needed([shard(0, 8), other], kinds(held, sharded=False))
    assert [piece.key for piece in replicated] == [
        "parameter/w", "parameter/v", "optimizer/v/exp_avg", "optimizer/v/step",
    ]  # fmt: skip


def test_nobody_holds_anything() -> None:
    assert newest([[shard(0, 8)]], [[]], sharded=False) is None
    assert rounds([Move(0, 0, 0, 0, (0,), (8,), 32)], 8) == []
