"""Snapshots: files are whole or known as torn, the ranks' shares make up the state, partners are on other nodes."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron.errors import TornSnapshot
from unicron.snapshot import files
from unicron.snapshot.files import Slot, SnapshotMeta
from unicron.snapshot.partners import Location, copied_shares, partners
from unicron.snapshot.taker import PORTION_BYTES, portions
from unicron.snapshot.transport import Receiver, Sender
from unicron.state.chunks import StateChunk
from unicron.state.copied_shares import equal_share

SIZES = (3, 64, 1000)


def meta(generation: int = 3, rank: int = 1) -> SnapshotMeta:
    fields = [((f"parameter/{n}", (n,), (0,), (n,), 0, n, "uint8"), n) for n in SIZES]
    return SnapshotMeta(generation=generation, rank=rank, world_size=2, identity="task", chunks=tuple(fields))


def write(folder: Path, *, slot: int = 0, step: int = 7, generation: int = 3, rank: int = 1) -> Path:
    """Write a whole snapshot whose values count up from the step; return its path."""
    snapshot_meta = meta(generation, rank)
    written = Slot(folder / files.name(generation, rank, slot), snapshot_meta)
    written.begin()
    for offset, (_, size) in zip(snapshot_meta.offsets(), snapshot_meta.chunks, strict=True):
        written.payload[offset : offset + size] = bytes((step + i) % 256 for i in range(size))
    written.seal(step, bytes(32))
    return written.path


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = files.read(write(tmp_path))
    assert (found.step, found.generation, found.rank, found.world_size, found.identity) == (7, 3, 1, 2, "task")
    assert [bytes(values) for values in found.chunks.values()] == [
        bytes((7 + i) % 256 for i in range(size)) for size in SIZES
    ]
    assert list(found.chunks) == [fields for fields, _ in meta().chunks]


@settings(deadline=None)
@given(st.data())
def test_any_change_of_a_snapshot_is_found(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder))
        content = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        else:
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        path.write_bytes(content)
        with pytest.raises(TornSnapshot):
            files.read(path)


def test_a_snapshot_is_torn_while_it_is_written_and_the_other_slot_is_whole(tmp_path: Path) -> None:
    write(tmp_path, slot=0, step=7)
    other = Slot(tmp_path / files.name(3, 1, 1), meta())
    other.seal(8, bytes(32))
    other.begin()
    found, torn = files.whole_snapshots(tmp_path, "task", before=4)
    assert [snapshot.step for snapshot in found] == [7]
    assert len(torn) == 1


@pytest.mark.parametrize("loss", ["", "removed", "replaced", "cut", "of another step", "torn"])
def test_a_slot_knows_whether_a_reader_finds_what_it_has_sealed(loss: str, tmp_path: Path) -> None:
    slot = Slot(tmp_path / files.name(3, 1, 0), meta())
    assert not slot.is_lost
    slot.seal(7, bytes(32))
    content = bytearray(slot.path.read_bytes())
    match loss:
        case "removed":
            slot.path.unlink()
        case "replaced":
            (tmp_path / "other").write_bytes(content)
            (tmp_path / "other").replace(slot.path)
        case "cut":
            slot.path.write_bytes(content[:20])
        case "of another step":
            Slot(slot.path, meta()).seal(6, bytes(32))
        case "torn":
            Slot(slot.path, meta()).begin()
    assert slot.is_lost == bool(loss)


def test_snapshots_of_another_task_or_a_later_generation_are_not_used(tmp_path: Path) -> None:
    write(tmp_path)
    assert files.whole_snapshots(tmp_path, "another", before=4) == ([], [])
    assert files.whole_snapshots(tmp_path, "task", before=3) == ([], [])


@pytest.mark.parametrize("of", [1, 2, 3, 7])
def test_each_snapshot_is_read_by_one_of_a_nodes_ranks(of: int, tmp_path: Path) -> None:
    written = {write(tmp_path, rank=rank, slot=slot) for rank in (0, 1, 10) for slot in (0, 1)}
    read = [
        snapshot.path
        for index in range(of)
        for snapshot in files.whole_snapshots(tmp_path, "task", 4, index=index, of=of)[0]
    ]
    assert sorted(read) == sorted(written)


def test_snapshots_of_older_generations_are_removed(tmp_path: Path) -> None:
    for generation in (1, 2, 10):
        write(tmp_path, generation=generation)
    (tmp_path / "something-else").touch()
    files.remove(tmp_path, before=10)
    assert {path.name for path in tmp_path.iterdir()} == {"10-1-0.copy", "something-else"}


shapes_and_types = st.lists(
    st.tuples(st.lists(st.integers(1, 9), max_size=3), st.sampled_from(["float32", "bfloat16", "int64", "uint8"])),
    min_size=1,
    max_size=6,
)


@given(shapes_and_types, st.integers(1, 7))
def test_the_shares_are_about_equal_and_have_each_element_once(shapes: list[tuple[list[int], str]], of: int) -> None:
    chunks = []
    for index, (shape, dtype) in enumerate(shapes):
        size = 1
        for extent in shape:
            size *= extent
        chunks.append(StateChunk(f"parameter/{index}", tuple(shape), (0,) * len(shape), tuple(shape), 0, size, dtype))
    total = sum(chunk.bytes for chunk in chunks)
    found: dict[str, list[tuple[int, int]]] = {}
    for index in range(of):
        share = equal_share(chunks, index, of)
        assert abs(sum(chunk.bytes for chunk in share) - total / of) <= 8  # an element on either side
        for chunk in share:
            found.setdefault(chunk.key, []).append((chunk.start, chunk.stop))
    for chunk in chunks:
        ranges = found[chunk.key]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == chunk.stop
        assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=12))
def test_a_partner_is_in_another_failure_domain_or_else_on_another_node(pairs: list[tuple[int, int]]) -> None:
    domain_of = dict(pairs)  # a node is in one domain
    places = [(f"n{node}", f"d{domain_of[node]}") for node, _ in pairs]
    chosen = partners(places)
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
def test_shares_that_replicas_have_in_common_are_in_two_domains_or_have_to_be_sent(
    pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Each share is in two failure domains, or on two nodes of the only one; otherwise no rank keeps another's."""
    domain_of = dict(pairs)
    places = [Location(f"n{node}", f"d{domain_of[node]}", ("127.0.0.1", 1), b"") for node, _ in pairs]
    group = sorted(data.draw(st.sets(st.integers(0, len(places) - 1), min_size=1), label="group"))
    kept = {rank: copied_shares(places, group, rank) for rank in group}
    one_domain = len({place.domain for place in places}) == 1
    apart = {places[rank].node if one_domain else places[rank].domain for rank in group}
    if len(apart) == 1:
        assert all(shares_ is None for shares_ in kept.values())
        return
    for index in range(len(group)):
        owners = [places[rank] for rank in group if index in (kept[rank] or [])]
        assert len(owners) == 2
        assert len({p.node if one_domain else p.domain for p in owners}) == 2
    assert [(kept[rank] or [-1])[0] for rank in group] == list(range(len(group)))


@given(st.lists(st.integers(0, 2 * PORTION_BYTES), max_size=12))
def test_portions_have_all_chunks_in_order_and_only_the_last_is_small(sizes: list[int]) -> None:
    made = SnapshotMeta(
        generation=1,
        rank=0,
        world_size=1,
        identity="",
        chunks=tuple(((str(index),), size) for index, size in enumerate(sizes)),
    )
    found = list(portions(made))
    ends = [*made.offsets()[1:], made.payload_bytes]
    assert [n for first, last, _ in found for n in range(first, last)] == list(range(len(sizes)))
    assert [stop for _, _, stop in found] == [ends[last - 1] for _, last, _ in found]
    begins = [0, *(stop for _, _, stop in found)]
    assert all(stop - begin >= PORTION_BYTES for begin, (_, _, stop) in list(zip(begins, found, strict=False))[:-1])


def test_a_receiver_stores_snapshots_and_refuses_a_wrong_token_or_a_path(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs").mkdir()
    receiver = Receiver("127.0.0.1", tmp_path / "theirs")
    senders = []
    try:
        path = write(tmp_path / "mine")
        senders.append(Sender(receiver.address, receiver.token))
        for _ in range(2):
            senders[0].send(path.name, memoryview(path.read_bytes()))
        assert files.read(tmp_path / "theirs" / path.name).step == 7
        stranger = Sender(receiver.address, bytes(16))
        senders.append(stranger)
        with pytest.raises(OSError):  # noqa: PT011  # which error depends on when the connection ends
            stranger.send(files.name(3, 0, 0), memoryview(bytes(1000)))
        with pytest.raises(OSError):  # noqa: PT011
            senders[0].send("../other", memoryview(bytes(1000)))
        assert {p.name for p in (tmp_path / "theirs").iterdir()} == {path.name}
    finally:
        for sender in senders:
            sender.close()
        receiver.close()


def test_a_receiver_stores_anew_what_is_gone_from_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (tmp_path / "mine").mkdir()
    receiver = Receiver("127.0.0.1", folder)
    sender = Sender(receiver.address, receiver.token)
    try:
        path = write(tmp_path / "mine")
        content = memoryview(path.read_bytes())
        assert sender.send(path.name, content)
        assert not receiver.is_lost
        (folder / path.name).unlink()
        assert receiver.is_lost
        assert sender.send(path.name, content)
        assert not receiver.is_lost
        shutil.rmtree(folder)
        assert receiver.is_lost
        assert not sender.send(path.name, content), "there is no folder, and the connection stays"
        folder.mkdir()
        assert sender.send(path.name, content)
        assert not receiver.is_lost
        assert files.read(folder / path.name).step == 7
        receiver.generation = 4
        (folder / path.name).unlink()
        assert not receiver.is_lost, "what older generations have left may be deleted"
    finally:
        sender.close()
        receiver.close()


def test_a_send_ends_when_the_sender_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver accepts the connection and then does nothing."""
    (tmp_path / "theirs").mkdir()
    receiver = Receiver("127.0.0.1", tmp_path / "theirs")
    blocked, go_on = threading.Event(), threading.Event()

    def store(*_: object) -> None:
        blocked.set()
        go_on.wait()
        raise OSError

    monkeypatch.setattr(receiver, "_store", store)
    sender = Sender(receiver.address, receiver.token)
    failed: list[BaseException] = []

    def send() -> None:
        try:
            sender.send(files.name(3, 0, 0), memoryview(bytes(1000)))
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
