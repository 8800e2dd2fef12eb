"""A message of every kind on the bus, and whom it goes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.bus.endpoints import Codec
from shared.bus.identities import SERVICES
from shared.events.measurements import Measurement, Rate
from shared.messages.admission import (
    AGENT_RESTART,
    ALIVE,
    DEPARTURES,
    HELLO,
    REVOKED,
    AgentRestart,
    AgentRestartResult,
    Answer,
    Hello,
    Revocation,
)
from shared.messages.commands import COMMANDS, LEFTOVERS, DrainTask, HoldTask, StopTask
from shared.messages.common_time import TIME, TimeReply
from shared.messages.health import AGENT, HEALTH, Health
from shared.messages.limits_in_force import LIMITS, LimitsReply, LimitsRequest, NodeLimits
from shared.messages.node_files import (
    CODE,
    FILES,
    CheckInputs,
    DescribeResult,
    FilesReply,
    InputProblem,
    ListMetrics,
    ListOutput,
    RankFile,
    ReadCode,
    ReadMetrics,
    ReadOutput,
    ReadResult,
)
from shared.messages.preflight import (
    MEET,
    NEIGHBOUR,
    PREFLIGHT,
    MeetReply,
    MeetRequest,
    NeighbourAnswer,
    NeighbourRequest,
    PreflightAnswer,
    PreflightReport,
)
from shared.messages.probes import PROBE, ProbeReply, ProbeRequest, ProbeTarget
from shared.messages.reachability import REACHABILITY, Reachability, Unreachable
from shared.messages.self_test import SELF_TEST
from shared.messages.signals import HEARTBEATS, SIGNALS
from shared.model import Model
from tests.versions.kit import (
    COMMAND_SAMPLES,
    LEAVING_SAMPLES,
    LEFT_SAMPLES,
    NOW,
    REPLY_SAMPLES,
    SIGNAL_SAMPLES,
    TEST_SAMPLES,
    TESTED_SAMPLES,
    heartbeat,
)

INCARNATION = "1" * 32

_COMMAND: dict[str, Any] = {"command_id": "c9", "plan": "p", "task": "gpt", "generation": 1, "workers": ["n0/0"]}

COMMANDS_OF_ALL_KINDS: list[Model] = [
    *COMMAND_SAMPLES,
    HoldTask(**_COMMAND, lost=["n0/1"]),
    DrainTask(**_COMMAND),
    StopTask(**_COMMAND, lose_steps=True),
]

FILE_REQUESTS: list[Model] = [
    ListOutput(task="gpt", nodes=["n0"]),
    ReadOutput(task="gpt", generation=1, worker="n0/0", offset=0),
    ListMetrics(task="gpt", nodes=["n0"]),
    ReadMetrics(task="gpt", generation=1, worker="n0/0", offset=0),
    DescribeResult(task="gpt", generation=1),
    ReadResult(task="gpt", generation=1, offset=0),
    CheckInputs(data="/none", script="/none.py", vocabulary=257),
]

CODE_REQUESTS: list[Model] = [ReadCode(node="n0", task="gpt", digest="0" * 64, offset=0)]

PROBE_REQUESTS: list[Model] = [
    ProbeRequest(peers={"n1": ProbeTarget(address="127.0.0.1:1", incarnation=INCARNATION)}, timeout_s=0.01)
]

HELLOS: list[Model] = [Hello(node="n0", incarnation=INCARNATION, addresses={"address": "10.0.0.1"}, network="n")]

REACHABILITIES: list[Model] = [
    Reachability(unreachable={"n1": Unreachable(since=NOW, reached_by=["@detector"])}, cut_off_since=NOW)
]

NEIGHBOUR_REQUESTS: list[Model] = [
    NeighbourRequest(node="n0", device="a", count=2, store="10.0.0.1:4000", known=["n1"])
]
MEETINGS: list[Model] = [MeetRequest(peer="n1", store="10.0.0.1:4000")]

PREFLIGHTS: list[Model] = [
    PreflightReport(
        node="n0",
        incarnation=INCARNATION,
        report="r",
        agent_pid=7,
        workers=["n0/0"],
        measurement=Measurement(device="a", count=2, rates=[Rate(quantity="disk read", value=1e9)], problems=["late"]),
    )
]

LIMITS_REQUESTS: list[Model] = [LimitsRequest(nodes=["n1"])]

LIMITS_REPLIES: list[Model] = [
    LimitsReply(
        nodes=[
            NodeLimits(
                node="n1",
                silence_s=0.1,
                phi=0.0,
                ask_s=0.3,
                limit_s=1.2,
                source="floor",
                samples=256,
                median_delay_s=0.001,
                longest_delay_s=0.02,
            )
        ]
    )
]

TIMES: list[Model] = [TimeReply(at=NOW)]

HEALTHS: list[Model] = [Health(name="api", pid=7, ready=True, counters={"undecodable": 1})]

KINDS: list[tuple[Codec[Any], Sequence[Model]]] = [
    (HEARTBEATS.request, [heartbeat()]),
    (SIGNALS.request, SIGNAL_SAMPLES),
    (COMMANDS.request, COMMANDS_OF_ALL_KINDS),
    (COMMANDS.reply, REPLY_SAMPLES),
    (DEPARTURES.request, LEAVING_SAMPLES),
    (DEPARTURES.reply, LEFT_SAMPLES),
    (LIMITS.request, LIMITS_REQUESTS),
    (LIMITS.reply, LIMITS_REPLIES),
    (PREFLIGHT.request, PREFLIGHTS),
    (PREFLIGHT.reply, [PreflightAnswer(verdict="refused", reason="host memory: 1 GB/s")]),
    (NEIGHBOUR.request, NEIGHBOUR_REQUESTS),
    (NEIGHBOUR.reply, [NeighbourAnswer(), NeighbourAnswer(peer="n1", store="10.0.0.1:4000")]),
    (MEET.request, MEETINGS),
    (MEET.reply, [MeetReply(begins=True)]),
    (SELF_TEST.request, TEST_SAMPLES),
    (SELF_TEST.reply, TESTED_SAMPLES),
    (HELLO.request, HELLOS),
    (HELLO.reply, [Answer(verdict="wait", detail="the detector starts")]),
    (REVOKED.request, [Revocation(node="n0", detail="given to another one")]),
    (AGENT_RESTART.request, [AgentRestart(incarnation=INCARNATION)]),
    (AGENT_RESTART.reply, [AgentRestartResult(incarnation=INCARNATION)]),
    (PROBE.request, PROBE_REQUESTS),
    (PROBE.reply, [ProbeReply(node="n0", outcomes={"n1": "silent"}, round_trips_s={"n1": 0.1})]),
    (FILES.request, FILE_REQUESTS),
    (CODE.request, CODE_REQUESTS),
    (
        FILES.reply,
        [
            FilesReply(files=[RankFile(generation=1, worker="n0/0", size_bytes=9)], sha256="0" * 64),
            FilesReply(problems=[InputProblem(field="data", problem="no such file")]),
        ],
    ),
    (REACHABILITY.request, REACHABILITIES),
    (TIME.reply, TIMES),
    (HEALTH.reply, HEALTHS),
]
"""The codec of each kind, and messages of it."""


@dataclass(frozen=True)
class Target:
    """Who takes messages of a kind. ``answers``: whether each message is answered, whatever it is."""

    subject: str
    codec: Codec[Any]
    samples: Sequence[Model]
    answers: bool = True


def agent_targets(node: str, incarnation: str) -> list[Target]:
    """Return what an agent subscribes to."""
    return [
        Target(COMMANDS.at(node), COMMANDS.request, COMMANDS_OF_ALL_KINDS),
        Target(LEFTOVERS.at(node), LEFTOVERS.request, COMMANDS_OF_ALL_KINDS),
        Target(FILES.at(node), FILES.request, FILE_REQUESTS),
        Target(PROBE.at(node), PROBE.request, PROBE_REQUESTS),
        Target(SELF_TEST.at(node), SELF_TEST.request, TEST_SAMPLES),
        Target(AGENT_RESTART.at(node), AGENT_RESTART.request, [AgentRestart(incarnation=INCARNATION)]),
        # Whatever these two are asked is answered in the same way.
        Target(ALIVE.at(node, incarnation), HELLO.request, HELLOS),
        Target(HEALTH.at(f"{AGENT}{node}"), HEALTH.reply, HEALTHS),
        Target(REVOKED.at(node, incarnation), REVOKED.request, [Revocation(node=node, detail="")], answers=False),
    ]


def service_targets(node: str) -> list[Target]:
    """Return what the services subscribe to; a node's messages come from this one."""
    return [
        Target(SIGNALS.at(node), SIGNALS.request, SIGNAL_SAMPLES),
        Target(HELLO.at(node), HELLO.request, HELLOS),
        Target(PREFLIGHT.at(node), PREFLIGHT.request, PREFLIGHTS),
        Target(NEIGHBOUR.at(node), NEIGHBOUR.request, NEIGHBOUR_REQUESTS),
        Target(DEPARTURES.at(node), DEPARTURES.request, LEAVING_SAMPLES),
        Target(TIME.subject, TIME.reply, TIMES),
        *(Target(HEALTH.at(name), HEALTH.reply, HEALTHS) for name in SERVICES),
        Target(CODE.at(node), CODE.request, CODE_REQUESTS),
        Target(HEARTBEATS.at(node), HEARTBEATS.request, [heartbeat()], answers=False),
        Target(LIMITS.subject, LIMITS.request, LIMITS_REQUESTS),
        Target(REACHABILITY.subject, REACHABILITY.request, REACHABILITIES, answers=False),
    ]
