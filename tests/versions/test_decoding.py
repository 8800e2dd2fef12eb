"""Decoding of messages: pure functions, on anything."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.bus.dropped import MAX_LINES, DroppedMessages
from shared.bus.endpoints import Codec
from shared.bus.messages import MAX_INTEGER
from shared.errors import InvalidInput, Undecodable
from shared.events.codes import FailureCode
from shared.events.plans import TaskChange
from shared.events.union import TaskSubmitted
from shared.log.writing import draft
from shared.messages.admission import DEPARTURES
from shared.messages.commands import COMMANDS, Prepare
from shared.messages.self_test import SELF_TEST
from shared.messages.signals import HEARTBEATS, PHASES, SIGNALS, RankRaised
from shared.model import Model
from shared.settings.model import read_settings
from shared.tasks.specification import TaskSpec, parse_spec
from tests.agent.kit import SPEC, stage
from tests.detector.kit import START, Monitor, at, moved, plan
from tests.versions.kit import (
    COMMAND_SAMPLES,
    ILL,
    LEAVING_SAMPLES,
    LEFT_SAMPLES,
    LONE_SURROGATE,
    REPLY_SAMPLES,
    SIGNAL_SAMPLES,
    TEST_SAMPLES,
    TESTED_SAMPLES,
    document,
    exchanged,
    extended,
    heartbeat,
    ill_formed,
    places,
)
from unicron.protocol import messages

KINDS: list[tuple[Codec[Any], list[Model]]] = [
    (HEARTBEATS.request, [heartbeat()]),
    (SIGNALS.request, SIGNAL_SAMPLES),
    (COMMANDS.request, COMMAND_SAMPLES),
    (COMMANDS.reply, REPLY_SAMPLES),
    (DEPARTURES.request, LEAVING_SAMPLES),
    (DEPARTURES.reply, LEFT_SAMPLES),
    (SELF_TEST.request, TEST_SAMPLES),
    (SELF_TEST.reply, TESTED_SAMPLES),
]
SAMPLES = [(codec, sample) for codec, samples in KINDS for sample in samples]


@pytest.mark.parametrize(("codec", "sample"), SAMPLES)
def test_fields_that_are_not_known_are_ignored_at_every_level(codec: Codec[Any], sample: Model) -> None:
    newer = extended(document(sample))
    assert newer != document(sample)
    assert codec.decode(json.dumps(newer).encode()) == sample


@pytest.mark.parametrize(("codec", "sample"), SAMPLES)
def test_a_message_without_a_version_has_version_1(codec: Codec[Any], sample: Model) -> None:
    fields = document(sample)
    assert fields.pop("protocol") == 1
    assert codec.decode(json.dumps(fields).encode()) == sample


@pytest.mark.parametrize(("codec", "sample"), SAMPLES)
@pytest.mark.parametrize("version", [0, 3, 10**30, "two", None])
def test_a_version_that_is_not_readable_is_refused_by_number(codec: Codec[Any], sample: Model, version: object) -> None:
    data = json.dumps({**document(sample), "protocol": version}).encode()
    with pytest.raises(Undecodable, match="this program reads version 1, 2") as refused:
        codec.decode(data)
    assert str(version) in refused.value.detail


def test_an_undecodable_message_says_what_it_is() -> None:
    signal = {**document(SIGNAL_SAMPLES[0]), "kind": "gpu-on-fire"}
    with pytest.raises(Undecodable, match=r"'gpu-on-fire' .* does not match any of the expected tags") as refused:
        SIGNALS.request.decode(json.dumps(signal).encode())
    assert (refused.value.kind, refused.value.node) == ("gpu-on-fire", "n0")
    command = {**document(COMMAND_SAMPLES[1]), "generation": "x"}
    with pytest.raises(Undecodable, match=r"open-store.generation: .*\(given: 'x'\)") as refused:
        COMMANDS.request.decode(json.dumps(command).encode())
    assert refused.value.command_id == "c2"


def test_values_of_a_newer_version_have_a_fallback_where_there_is_a_safe_one() -> None:
    beat = document(heartbeat())
    beat["workers"][0] |= {"state": "dreaming", "phase": "compressing"}
    status = HEARTBEATS.request.decode(json.dumps(beat).encode()).workers[0]
    assert (status.state, status.phase, status.step) == ("waiting", None, 4)
    raised = SIGNALS.request.decode(json.dumps({**document(SIGNAL_SAMPLES[1]), "cause": "fire"}).encode())
    assert isinstance(raised, RankRaised)
    assert raised.cause == "exception"
    reply = COMMANDS.reply.decode(json.dumps({**document(REPLY_SAMPLES[1]), "code": "gpu-on-fire"}).encode())
    assert reply.code is FailureCode.UNKNOWN
    configure = document(COMMAND_SAMPLES[2])
    configure["stage"]["kind"] = "sideways"
    with pytest.raises(Undecodable, match=r"stage\.kind"):
        COMMANDS.request.decode(json.dumps(configure).encode())


def test_the_known_phases_are_those_of_the_ranks() -> None:
    assert PHASES == messages.PHASES


def test_an_option_of_a_task_that_an_agent_does_not_know_is_refused_and_not_ignored() -> None:
    prepare = document(COMMAND_SAMPLES[0])
    prepare["spec"]["optimizer"] = {"momentum": 0.9}
    with pytest.raises(Undecodable, match=r"spec: .*optimizer.momentum: Extra inputs are not permitted"):
        COMMANDS.request.decode(json.dumps(prepare).encode())


def test_a_command_has_only_the_options_that_differ_from_their_defaults() -> None:
    assert set(document(COMMAND_SAMPLES[0])["spec"]) == set(SPEC)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "weight": st.floats(0.1, 10),
            "seed": st.integers(0, 9),
            "exact": st.booleans(),
            "optimizer": st.fixed_dictionaries({}, optional={"name": st.just("sgd"), "lr": st.floats(1e-5, 1)}),
            "checkpoint": st.fixed_dictionaries({}, optional={"every": st.integers(0, 99), "keep": st.integers(2, 9)}),
            "parallel": st.fixed_dictionaries({}, optional={"tensor": st.sampled_from([1, 2, "auto"])}),
            "env": st.dictionaries(st.sampled_from("ABC"), st.text("xyz")),
        },
    )
)
def test_a_specification_arrives_as_it_was_sent(options: dict[str, Any]) -> None:
    spec = parse_spec({**SPEC, **options})
    sent = Prepare(command_id="c", plan="p", task="gpt", generation=1, workers=[], spec=spec)
    received = COMMANDS.request.decode(sent.model_dump_json(by_alias=True).encode())
    assert isinstance(received, Prepare)
    assert received.spec == spec == TaskSpec.model_validate(document(sent)["spec"])


NAMES = ["", "\0", "n\0", "n0\n", "N0", "a.b", "a/b", "a b", "*", ">", "..", "-a", "a-", "ä", "a" * 64]


@pytest.mark.parametrize("name", NAMES)
def test_a_node_with_another_name_than_a_task_could_have_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInput, match="node: String should match pattern") as refused:
        read_settings(node=name)
    assert refused.value.extra["errors"][0]["field"] == "node"
    assert refused.value.extra["errors"][0]["value"] == name
    beat = json.dumps({**document(heartbeat()), "node": name, "workers": []}).encode()
    with pytest.raises(Undecodable, match="node: String should match pattern"):
        HEARTBEATS.request.decode(beat)


@pytest.mark.parametrize("task", ["../..", "a/b", "\0", ""])
def test_a_command_names_no_folder_outside_of_its_task(task: str) -> None:
    release = {**document(COMMAND_SAMPLES[3]), "task": task}
    with pytest.raises(Undecodable, match=r"release\.task"):
        COMMANDS.request.decode(json.dumps(release).encode())


@pytest.mark.parametrize("worker", ["n0", "../x/0", "n0/0/1", "n0/-1", "n0/0000001", "N0/0", "n0/0\n"])
def test_a_command_and_its_answer_name_workers_only(worker: str) -> None:
    release = {**document(COMMAND_SAMPLES[3]), "workers": [worker]}
    with pytest.raises(Undecodable, match=r"release\.workers\.0"):
        COMMANDS.request.decode(json.dumps(release).encode())
    configure = document(COMMAND_SAMPLES[2])
    configure["stage"]["members"] = [{"rank": 0, "worker": worker, "node": "n0", "source": "live"}]
    with pytest.raises(Undecodable, match="is no worker of node 'n0'"):
        COMMANDS.request.decode(json.dumps(configure).encode())
    configure["stage"]["members"] = [{"source": "live", "workers": worker}]
    with pytest.raises(Undecodable, match=r"is no worker of node|is neither <node>/<slot> nor"):
        COMMANDS.request.decode(json.dumps(configure).encode())
    reply = {**document(REPLY_SAMPLES[0]), "workers": {worker: {}}}
    with pytest.raises(Undecodable, match=r"workers\..*String should match pattern"):
        COMMANDS.reply.decode(json.dumps(reply).encode())


def test_a_short_text_is_no_thousands_of_millions_of_workers() -> None:
    configure = document(COMMAND_SAMPLES[2])
    for members in (
        [{"source": "live", "workers": ",".join(["n0/0-65535"] * 10_000)}],
        [{"source": "live", "workers": "n0/0-65535"}] * 10_000,
    ):
        configure["stage"]["members"] = members
        with pytest.raises(Undecodable, match=r"more than \d+ (workers|members)"):
            COMMANDS.request.decode(json.dumps(configure).encode())


def test_a_heartbeat_speaks_of_its_own_workers_once() -> None:
    beat = document(heartbeat())
    beat["workers"][1]["worker"] = "n1/0"
    with pytest.raises(Undecodable, match="n1/0 is not of node n0"):
        HEARTBEATS.request.decode(json.dumps(beat).encode())
    beat["workers"][1]["worker"] = "n0/0"
    with pytest.raises(Undecodable, match="listed twice"):
        HEARTBEATS.request.decode(json.dumps(beat).encode())


def running() -> Monitor:
    """A monitor with a task that trains on two workers of n0."""
    monitor = Monitor(START)
    workers = ["n0/0", "n0/1"]
    target = stage(1, workers, source="initial")
    change = TaskChange(task="gpt", reason="new", action="move", from_generation=0, prepare=workers, target=target)
    submitted = TaskSubmitted(event_id="submitted", occurred_at=START, task="gpt", spec=parse_spec(SPEC))
    for event in (submitted, plan("p1", "submitted", change), moved("p1", 1, "restored", complete=True)):
        monitor.fold(event)
    return monitor


READ = [*KINDS[:2], (DEPARTURES.request, LEAVING_SAMPLES)]
"""What the detector reads and decides on."""


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.lists(st.sampled_from(READ).flatmap(lambda k: st.tuples(st.just(k[0]), ill_formed(k[1]))), max_size=8))
def test_whatever_the_detector_reads_gives_events_that_the_log_can_store(
    drawn: list[tuple[Codec[Any], bytes]],
) -> None:
    monitor, ids = running(), set[str]()
    for second, (codec, data) in enumerate(drawn):
        monitor.echo(at(second))
        try:
            message = codec.decode(data)
        except Undecodable:
            continue
        for event in [*monitor.feed(message, at(second)).events, *monitor.tick(at(second + 0.5)).events]:
            draft(event)
            assert event.event_id not in ids
            ids.add(event.event_id)


def test_an_incarnation_that_was_replaced_does_not_join_again() -> None:
    """The log has its event: another one of that id would end the detector."""
    monitor = Monitor(START)
    found = []
    for second, incarnation in enumerate(("a", "b", "a", "b", "a")):
        beat = heartbeat(second, incarnation=incarnation, sent_at=at(second))
        found += [event.type for event in monitor.feed(beat, at(second)).events]
    assert found == ["node.joined", "error.detected", "node.joined"]
    other = heartbeat(node="n1", workers=[], incarnation="b")
    assert monitor.feed(other, at(9)).events == []


# ---- counting


def test_dropped_messages_are_counted_and_logged_once_for_each_source_and_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counters: dict[str, int] = {}
    dropped = DroppedMessages(counters)
    assert counters == {}
    for source, kind in [("n0", "a"), ("n0", "a"), ("n0", "b"), ("n1", "a"), ("n1", "a")]:
        dropped.note(source, Undecodable("not known", kind=kind))
    assert counters == {"undecodable": 5}
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 3
    assert warned[0] == "a message of kind a from n0 was dropped, and others like it will be: not known"


def test_names_at_random_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    dropped = DroppedMessages({})
    for number in range(2 * MAX_LINES):
        dropped.note(f"n{number}", Undecodable("not known"))
    assert dropped.counters == {"undecodable": 2 * MAX_LINES}
    assert len(caplog.records) == MAX_LINES + 1
    assert "no more are logged" in caplog.records[-1].getMessage()


# ---- ranks and agents

RANK_SAMPLES: list[messages.Message] = [
    messages.Hello(version=2, task="gpt", worker="n0/0", pid=7),
    messages.Progress(generation=1, rank=0, step=4, phase="ended", loss=2.0, duration_s=0.5),
    messages.Resumed(generation=1, step=4, source="own", phases={"rebuild": 0.1}, deal={"0": [1, 2]}),
    messages.Raised(generation=1, rank=0, step=4, kind="exception", error="E", detail="d", traceback="t"),
    messages.Configure(
        generation=1, stage="boundary", rank=0, world_size=1, tensor=1, pipeline=1, store_host="", store_port=0,
        members=[[0, "n0/0", "initial"]],
    ),
]  # fmt: skip


@pytest.mark.parametrize("message", RANK_SAMPLES)
def test_ranks_and_agents_ignore_fields_that_they_do_not_know(message: messages.Message) -> None:
    newer = {**json.loads(messages.encode(message)), "added_later": {"deep": [1]}}
    assert messages.decode(json.dumps(newer).encode()) == message


@given(st.data())
def test_any_line_is_a_message_of_the_declared_types_or_an_error(data: st.DataObject) -> None:
    ordinary = json.loads(messages.encode(data.draw(st.sampled_from(RANK_SAMPLES))))
    path = data.draw(st.sampled_from(places(ordinary)))
    value = data.draw(st.one_of(st.sampled_from([*ILL, LONE_SURROGATE]), st.text(max_size=9)))
    line = data.draw(st.one_of(st.just(json.dumps(exchanged(ordinary, path, value)).encode()), st.binary(max_size=99)))
    try:
        message = messages.decode(line)
    except messages.ProtocolError:
        return
    assert messages.decode(messages.encode(message)) == message
    if isinstance(message, messages.Progress):
        assert isinstance(message.step, int)
        assert 0 <= message.step <= MAX_INTEGER
        assert message.loss is None or abs(message.loss) < float("inf")


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"message":' + b"[" * 100_000, b"9" * 5000, b'{"message":["a"]}'])
def test_deep_and_long_lines_are_protocol_errors(line: bytes) -> None:
    with pytest.raises(messages.ProtocolError):
        messages.decode(line)


def test_an_unknown_message_is_named_in_its_error() -> None:
    with pytest.raises(messages.ProtocolError) as refused:
        messages.decode(b'{"message":"later","x":1}')
    assert refused.value.name == "later"


def test_a_loss_that_is_not_finite_is_read_as_none() -> None:
    progress = messages.Progress(generation=1, rank=0, step=4, phase="ended", loss=float("nan"), duration_s=0.5)
    read = messages.decode(messages.encode(progress))
    assert isinstance(read, messages.Progress)
    assert (read.loss, read.duration_s) == (None, 0.5)
