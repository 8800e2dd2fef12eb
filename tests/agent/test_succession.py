"""What an agent leaves and its successor finds, without processes."""

from __future__ import annotations

import os
from datetime import UTC, datetime

from services.agent.node.process import Process
from services.agent.node.record import NodeRecord, RecordFile, StoreRecord
from services.agent.node.slots import Node
from services.agent.ranks.fork_server import Children
from services.agent.succession.findings import compare
from shared.messages.commands import Reply
from shared.messages.signals import ProcessExited
from unicron.protocol.messages import Drained, Held, Progress, Resumed, StopRefused

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def node() -> Node:
    """A node one of whose two workers trains."""
    made = Node.create("n0", "first", 2)
    process = made.start("gpt", "n0/0", 1)
    process.pid, process.attached = 7, True
    made.admit("gpt", 3, "p3")
    made.configure(process, generation=3, rank=0, at_s=1.0)
    resumed = Resumed(generation=3, step=4, source="own", phases={"rebuild": 0.5}, deal={"0": [1, 2]})
    made.receive(process, resumed, at_s=2.0, now=NOW)
    made.receive(process, StopRefused(generation=3, rank=0, step=4, reason="/\udcff"), at_s=2.0, now=NOW)
    return made


def test_a_node_is_restored_from_its_record() -> None:
    before = node()
    exited = ProcessExited(
        signal_id="s", node="n0", incarnation="first", occurred_at=NOW, task="gpt", worker="n0/1", generation=3, rank=1,
        step=4, pid=8, exit_code=-9,
    )  # fmt: skip
    written = NodeRecord(
        processes=list(before.processes()),
        fences=before.fences,
        signals=[exited],
        stores=[StoreRecord(task="gpt", generation=3, id="store-1")],
        replies=[Reply(command_id="c", node="n0", ok=True)],
    )
    file = RecordFile.create()
    file.write(written)
    read = RecordFile(file.descriptors).read()
    assert read is not None
    assert read == written.model_copy(update={"sequence": 1})
    after = Node.restored("n0", "second", 2, processes=read.processes, fences=read.fences, at_s=9.0)
    process = after.slots["n0/0"]
    assert process is not None
    assert (process.attached, process.progress_at_s, process.step) == (False, 9.0, 4)
    assert process.resumed == next(before.processes()).resumed
    assert after.slots["n0/1"] is None
    assert after.fenced("gpt", 2, "another")
    assert not after.fenced("gpt", 2, "p3")
    assert after.start("gpt", "n0/1", 4).id == "second-1"  # no process has the id of a predecessor's
    file.close()


def test_a_record_that_was_written_in_part_leaves_the_one_before() -> None:
    file = RecordFile.create()
    assert file.read() is None
    for number in (1, 2):
        file.write(NodeRecord(stores=[StoreRecord(task="gpt", generation=number, id="s")]))
    newest = file.descriptors[0]
    os.ftruncate(newest, os.fstat(newest).st_size - 1)
    successor = RecordFile(file.descriptors)
    read = successor.read()
    assert read is not None
    assert [store.generation for store in read.stores] == [1]
    successor.write(NodeRecord())
    assert RecordFile(file.descriptors).read() == NodeRecord(sequence=2)
    file.close()


def test_a_record_of_another_version_is_read_as_far_as_it_is_known() -> None:
    file = RecordFile.create()
    process = b'{"id": "a", "task": "t", "worker": "n0/0", "generation": 1, "newer": 2}'
    os.write(file.descriptors[0], b'{"sequence": 5, "later": 1, "processes": [' + process + b"]}")
    read = file.read()
    assert read is not None
    assert read.processes == [Process(id="a", task="t", worker="n0/0", generation=1)]
    file.close()


def test_the_record_is_compared_with_the_processes_that_there_are() -> None:
    named = {name: Process(id=name, task="t", worker=f"n0/{slot}", generation=1) for slot, name in enumerate("abcd")}
    for name in "abc":
        named[name].pid = 1
    left = NodeRecord(stores=[StoreRecord(task="t", generation=1, id="s"), StoreRecord(task="t", generation=2, id="x")])
    found = compare(left, list(named.values()), Children({"a": 11, "s": 12, "u": 13}, {"b": -9}))
    assert found.running == [(named["a"], 11)]
    assert found.gone == [named["c"]]
    assert found.never_forked == [named["d"]]
    assert [(store.id, pid) for store, pid in found.stores] == [("s", 12)]
    assert found.unwanted == {"u": 13}


def test_an_answer_that_is_repeated_after_another_generation_has_begun_is_old() -> None:
    made = node()
    process = made.slots["n0/0"]
    assert process is not None
    for old in (Held(generation=2, step=1), Drained(generation=2, step=1)):
        made.receive(process, old, at_s=3.0, now=NOW)
        assert (process.resting, process.step) == (False, 4)
    made.receive(process, Held(generation=3, step=4), at_s=3.0, now=NOW)
    assert process.resting
    made.receive(process, Progress(generation=3, rank=0, step=5, phase="begun"), at_s=3.0, now=NOW)
    assert not process.resting
