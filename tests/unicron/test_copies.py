"""Copies are whole or refused, shares make up the state, and partners are where the owner is not."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron import copies
from unicron.copies import Layout, Slot
from unicron.errors import TornCopy
from unicron.memory import PORTION_BYTES, portions
from unicron.peers import Receiver, Sender
from unicron.pieces import Piece
from unicron.shares import Place, kept_shares, shares

SIZES = (3, 64, 1000)


def layout(generation: int = 3, rank: int = 1) -> Layout:
    fields = [((f"parameter/{n}", (n,), (0,), (n,), 0, n, "uint8"), n) for n in SIZES]
    return Layout(generation=generation, rank=rank, world_size=2, identity="task", pieces=tuple(fields))


def write(folder: Path, *, slot: int = 0, step: int = 7, generation: int = 3, rank: int = 1) -> Path:
    """Leave a whole copy; its values count up from the step."""
    made = layout(generation, rank)
    it = Slot(folder / copies.name(generation, rank, slot), made)
    it.begin()
    for at, (_, size) in zip(made.offsets(), made.pieces, strict=True):
        it.payload[at : at + size] = bytes((step + i) % 256 for i in range(size))
    it.seal(step, bytes(32))
    return it.path


def test_a_copy_is_read_as_it_was_written(tmp_path: Path) -> None:
    copy = copies.read(write(tmp_path))
    assert (copy.step, copy.generation, copy.rank, copy.world_size, copy.identity) == (7, 3, 1, 2, "task")
    assert [bytes(values) for values in copy.pieces.values()] == [
        bytes((7 + i) % 256 for i in range(size)) for size in SIZES
    ]
    assert list(copy.pieces) == [fields for fields, _ in layout().pieces]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_change_of_a_copy_is_found(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder))
        content = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        else:
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        path.write_bytes(content)
        with pytest.raises(TornCopy):
            copies.read(path)


def test_a_copy_that_is_being_written_is_torn_and_the_other_slot_is_not(tmp_path: Path) -> None:
    write(tmp_path, slot=0, step=7)
    it = Slot(tmp_path / copies.name(3, 1, 1), layout())
    it.seal(8, bytes(32))
    it.begin()
    found, refused = copies.held(tmp_path, "task", before=4)
    assert [copy.step for copy in found] == [7]
    assert len(refused) == 1


def test_what_another_task_or_a_later_generation_left_is_not_held(tmp_path: Path) -> None:
    write(tmp_path)
    assert copies.held(tmp_path, "another", before=4) == ([], [])
    assert copies.held(tmp_path, "task", before=3) == ([], [])


@pytest.mark.parametrize("of", [1, 2, 3, 7])
def test_each_copy_is_read_by_one_of_a_nodes_ranks(of: int, tmp_path: Path) -> None:
    written = {write(tmp_path, rank=rank, slot=slot) for rank in (0, 1, 10) for slot in (0, 1)}
    read = [copy.path for index in range(of) for copy in copies.held(tmp_path, "task", 4, index=index, of=of)[0]]
    assert sorted(read) == sorted(written)


def test_copies_of_older_generations_are_removed(tmp_path: Path) -> None:
    for generation in (1, 2, 10):
        write(tmp_path, generation=generation)
    (tmp_path / "something-else").touch()
    copies.remove(tmp_path, before=10)
    assert {path.name for path in tmp_path.iterdir()} == {"10-1-0.copy", "something-else"}


pieces_ = st.lists(
    st.tuples(st.lists(st.integers(1, 9), max_size=3), st.sampled_from(["float32", "bfloat16", "int64", "uint8"])),
    min_size=1,
    max_size=6,
)


@given(pieces_, st.integers(1, 7))
def test_the_shares_are_what_is_held_each_number_once_and_about_equal(
    shapes: list[tuple[list[int], str]], of: int
) -> None:
    held = []
    for index, (shape, dtype) in enumerate(shapes):
        size = 1
        for extent in shape:
            size *= extent
        held.append(Piece(f"parameter/{index}", tuple(shape), (0,) * len(shape), tuple(shape), 0, size, dtype))
    total = sum(piece.bytes for piece in held)
    found: dict[str, list[tuple[int, int]]] = {}
    for index in range(of):
        mine = shares(held, index, of)
        assert abs(sum(piece.bytes for piece in mine) - total / of) <= 8  # an element on either side
        for piece in mine:
            found.setdefault(piece.key, []).append((piece.start, piece.stop))
    for piece in held:
        ranges = found[piece.key]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == piece.stop
        assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=12))
def test_no_failure_domain_holds_all_copies_where_there_are_two(pairs: list[tuple[int, int]]) -> None:
    domain_of = dict(pairs)  # a node is in one domain
    places = [(f"n{node}", f"d{domain_of[node]}") for node, _ in pairs]
    chosen = copies.partners(places)
    domains = {domain for _, domain in places}
    nodes = {node for node, _ in places}
    for rank, partner in enumerate(chosen):
        if len(domains) > 1:
            assert partner is not None
            assert places[partner][1] != places[rank][1]
        elif len(nodes) > 1:
            assert partner is not None
            assert places[partner][0] != places[rank][0]
        else:
            assert partner is None
    if len(nodes) == len(places) == len(domains):
        assert sorted(p for p in chosen if p is not None) == ([*range(len(places))] if len(places) > 1 else [])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=12), st.data())
def test_what_replicas_hold_in_common_is_kept_apart_or_has_to_be_sent(
    pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Each share lies in two failure domains, or on two nodes of the only one; else nobody keeps another's."""
    domain_of = dict(pairs)
    places = [Place(f"n{node}", f"d{domain_of[node]}", ("127.0.0.1", 1), b"") for node, _ in pairs]
    group = sorted(data.draw(st.sets(st.integers(0, len(places) - 1), min_size=1), label="group"))
    kept = {rank: kept_shares(places, group, rank) for rank in group}
    one_domain = len({place.domain for place in places}) == 1
    apart = {places[rank].node if one_domain else places[rank].domain for rank in group}
    if len(apart) == 1:
        assert all(shares_ is None for shares_ in kept.values())
        return
    for index in range(len(group)):
        holders = [places[rank] for rank in group if index in (kept[rank] or [])]
        assert len(holders) == 2
        assert len({p.node if one_domain else p.domain for p in holders}) == 2
    assert [(kept[rank] or [-1])[0] for rank in group] == list(range(len(group)))


@given(st.lists(st.integers(0, 2 * PORTION_BYTES), max_size=12))
def test_portions_are_all_pieces_in_order_and_none_is_small_but_the_last(sizes: list[int]) -> None:
    made = Layout(
        generation=1,
        rank=0,
        world_size=1,
        identity="",
        pieces=tuple(((str(index),), size) for index, size in enumerate(sizes)),
    )
    found = list(portions(made))
    ends = [*made.offsets()[1:], made.payload_bytes]
    assert [n for first, last, _ in found for n in range(first, last)] == list(range(len(sizes)))
    assert [stop for _, _, stop in found] == [ends[last - 1] for _, last, _ in found]
    begins = [0, *(stop for _, _, stop in found)]
    assert all(stop - begin >= PORTION_BYTES for begin, (_, _, stop) in list(zip(begins, found, strict=False))[:-1])


def test_a_peer_keeps_a_copy_and_nothing_without_the_token_or_with_a_path(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs").mkdir()
    receiver = Receiver("127.0.0.1", tmp_path / "theirs")
    senders = []
    try:
        path = write(tmp_path / "mine")
        senders.append(Sender(receiver.address, receiver.token))
        for _ in range(2):
            senders[0].send(path.name, memoryview(path.read_bytes()))
        assert copies.read(tmp_path / "theirs" / path.name).step == 7
        stranger = Sender(receiver.address, bytes(16))
        senders.append(stranger)
        with pytest.raises(OSError):  # noqa: PT011  # the stranger is told nothing, whatever it sends
            stranger.send(copies.name(3, 0, 0), memoryview(bytes(1000)))
        with pytest.raises(OSError):  # noqa: PT011
            senders[0].send("../other", memoryview(bytes(1000)))
        assert {p.name for p in (tmp_path / "theirs").iterdir()} == {path.name}
    finally:
        for sender in senders:
            sender.close()
        receiver.close()


def test_a_send_ends_when_it_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer accepts and then stands still."""
    (tmp_path / "theirs").mkdir()
    receiver = Receiver("127.0.0.1", tmp_path / "theirs")
    blocked, go_on = threading.Event(), threading.Event()

    def keep(*_: object) -> None:
        blocked.set()
        go_on.wait()
        raise OSError

    monkeypatch.setattr(receiver, "_keep", keep)
    sender = Sender(receiver.address, receiver.token)
    failed: list[BaseException] = []

    def send() -> None:
        try:
            sender.send(copies.name(3, 0, 0), memoryview(bytes(1000)))
        except OSError as err:
            failed.append(err)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        assert blocked.wait(10)
        sender.close()
        thread.join(10)
        assert failed
    finally:
        go_on.set()
        with contextlib.suppress(OSError):
            receiver.close()
