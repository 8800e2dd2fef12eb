"""A message of every kind on the bus, and whom it goes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from shared.bus.identities import SERVICES
from shared.messages.admission import (
    ALIVE,
    ANSWER,
    DEPARTURE,
    DEPARTURE_ANSWER,
    DEPARTURES,
    HELLO,
    HELLO_MESSAGE,
    REVOCATION,
    REVOKED,
    Answer,
    Hello,
    Revocation,
)
from shared.messages.agent_restart import (
    AGENT_RESTART,
    AGENT_RESTART_REQUEST,
    AGENT_RESTART_RESULT,
    AgentRestart,
    AgentRestartResult,
)
from shared.messages.commands import COMMAND, COMMANDS, LEFTOVERS, RELEASE, REPLY, DrainTask, HoldTask, StopTask
from shared.messages.common_time import SUBJECT as TIME
from shared.messages.common_time import TIME_REPLY, TimeReply
from shared.messages.limits_in_force import LIMITS, LIMITS_REPLY, LIMITS_REQUEST, LimitsReply, LimitsRequest, NodeLimits
from shared.messages.node_files import (
    FILES,
    FILES_REPLY,
    FILES_REQUEST,
    CheckInputs,
    DescribeResult,
    FilesReply,
    InputProblem,
    ListOutput,
    OutputFile,
    ReadOutput,
    ReadResult,
)
from shared.messages.probes import PROBE, PROBE_REPLY, PROBE_REQUEST, ProbeReply, ProbeRequest, ProbeTarget
from shared.messages.reachability import MESSAGE, REACHABILITY, Reachability, Unreachable
from shared.messages.self_test import SELF_TEST, SELF_TEST_REQUEST, SELF_TEST_RESULT
from shared.messages.signals import HEARTBEAT, HEARTBEATS, SIGNAL, SIGNALS
from shared.model import Model
from shared.service.frame import AGENT, HEALTH, HEALTH_REPLY, Health
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
    DescribeResult(task="gpt", generation=1),
    ReadResult(task="gpt", generation=1, offset=0),
    CheckInputs(data="/none", script="/none.py", vocabulary=257),
]

PROBE_REQUESTS: list[Model] = [
    ProbeRequest(peers={"n1": ProbeTarget(address="127.0.0.1:1", incarnation=INCARNATION)}, timeout_s=0.01)
]

HELLOS: list[Model] = [Hello(node="n0", incarnation=INCARNATION, addresses={"address": "10.0.0.1"}, network="n")]

REACHABILITIES: list[Model] = [
    Reachability(unreachable={"n1": Unreachable(since=NOW, reached_by=["@detector"])}, cut_off_since=NOW)
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

KINDS: list[tuple[TypeAdapter[Any], Sequence[Model]]] = [
    (HEARTBEAT, [heartbeat()]),
    (SIGNAL, SIGNAL_SAMPLES),
    (COMMAND, COMMANDS_OF_ALL_KINDS),
    (REPLY, REPLY_SAMPLES),
    (DEPARTURE, LEAVING_SAMPLES),
    (DEPARTURE_ANSWER, LEFT_SAMPLES),
    (LIMITS_REQUEST, LIMITS_REQUESTS),
    (LIMITS_REPLY, LIMITS_REPLIES),
    (SELF_TEST_REQUEST, TEST_SAMPLES),
    (SELF_TEST_RESULT, TESTED_SAMPLES),
    (HELLO_MESSAGE, HELLOS),
    (ANSWER, [Answer(verdict="wait", detail="the detector starts")]),
    (REVOCATION, [Revocation(node="n0", detail="given to another one")]),
    (AGENT_RESTART_REQUEST, [AgentRestart(incarnation=INCARNATION)]),
    (AGENT_RESTART_RESULT, [AgentRestartResult(incarnation=INCARNATION)]),
    (PROBE_REQUEST, PROBE_REQUESTS),
    (PROBE_REPLY, [ProbeReply(node="n0", outcomes={"n1": "silent"}, round_trips_s={"n1": 0.1})]),
    (FILES_REQUEST, FILE_REQUESTS),
    (
        FILES_REPLY,
        [
            FilesReply(files=[OutputFile(generation=1, worker="n0/0", size_bytes=9)], sha256="0" * 64),
            FilesReply(problems=[InputProblem(field="data", problem="no such file")]),
        ],
    ),
    (MESSAGE, REACHABILITIES),
    (TIME_REPLY, TIMES),
    (HEALTH_REPLY, HEALTHS),
]
"""The adapter of each kind, and messages of it."""


@dataclass(frozen=True)
class Target:
    """Who takes messages of a kind. ``answers``: whether each message is answered, whatever it is."""

    subject: str
    adapter: TypeAdapter[Any]
    samples: Sequence[Model]
    answers: bool = True


def agent_targets(node: str, incarnation: str) -> list[Target]:
    """Return what an agent subscribes to."""
    return [
        Target(f"{COMMANDS}.{node}", COMMAND, COMMANDS_OF_ALL_KINDS),
        Target(f"{LEFTOVERS}.{node}", RELEASE, COMMANDS_OF_ALL_KINDS),
        Target(f"{FILES}.{node}", FILES_REQUEST, FILE_REQUESTS),
        Target(f"{PROBE}.{node}", PROBE_REQUEST, PROBE_REQUESTS),
        Target(f"{SELF_TEST}.{node}", SELF_TEST_REQUEST, TEST_SAMPLES),
        Target(f"{AGENT_RESTART}.{node}", AGENT_RESTART_REQUEST, [AgentRestart(incarnation=INCARNATION)]),
        # Whatever these two are asked is answered in the same way.
        Target(f"{ALIVE}.{node}.{incarnation}", HELLO_MESSAGE, HELLOS),
        Target(f"{HEALTH}.{AGENT}{node}", HEALTH_REPLY, HEALTHS),
        Target(f"{REVOKED}.{node}.{incarnation}", REVOCATION, [Revocation(node=node, detail="")], answers=False),
    ]


def service_targets(node: str) -> list[Target]:
    """Return what the services subscribe to; a node's messages come from this one."""
    return [
        Target(f"{SIGNALS}.{node}", SIGNAL, SIGNAL_SAMPLES),
        Target(f"{HELLO}.{node}", HELLO_MESSAGE, HELLOS),
        Target(f"{DEPARTURES}.{node}", DEPARTURE, LEAVING_SAMPLES),
        Target(TIME, TIME_REPLY, TIMES),
        *(Target(f"{HEALTH}.{name}", HEALTH_REPLY, HEALTHS) for name in SERVICES),
        Target(f"{HEARTBEATS}.{node}", HEARTBEAT, [heartbeat()], answers=False),
        Target(LIMITS, LIMITS_REQUEST, LIMITS_REQUESTS),
        Target(REACHABILITY, MESSAGE, REACHABILITIES, answers=False),
    ]
