"""Messages that no reader can rely on: any bytes, and ordinary messages with one part exchanged."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from shared.messages.admission import Departure, DepartureAnswer
from shared.messages.commands import ConfigureTask, OpenStore, Prepare, ReleaseTask, Reply, WorkerResult
from shared.messages.self_test import SelfTest, SelfTestResult
from shared.messages.signals import (
    DeviceFailed,
    DeviceReading,
    DeviceStatus,
    Heartbeat,
    ProcessExited,
    RankCheckpointed,
    RankFinished,
    RankRaised,
    WorkerStatus,
)
from shared.model import Model
from shared.tasks.specification import parse_spec
from tests.agent.kit import SPEC, stage

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def about_rank(signal_id: str = "s1") -> dict[str, Any]:
    identity = {"signal_id": signal_id, "node": "n0", "incarnation": "i", "occurred_at": NOW}
    return {**identity, "task": "gpt", "worker": "n0/1", "generation": 1, "rank": 1, "step": 4}


def heartbeat(sequence: int = 1, **fields: Any) -> Heartbeat:
    status = WorkerStatus(
        worker="n0/0", state="training", task="gpt", generation=1, rank=0, pid=7, step=4, phase="compute",
        progress_age_s=0.1, step_s=0.5, steps_timed=3, loss=2.0,
    )  # fmt: skip
    ordinary = {"node": "n0", "incarnation": "i", "agent_pid": 1, "sequence": sequence, "sent_at": NOW}
    device = DeviceStatus(device=0, uuid="GPU-0", notes=["hot"], faults={"xid-31": 1})
    reading = DeviceReading(
        device=0, uuid="GPU-0", name="NVIDIA H200", workers=["n0/0"], memory_bytes=150_754_820_096, driver="580.1",
        temperature_c=36, utilisation_percent=98, memory_used_bytes=12_000_000_000,
    )  # fmt: skip
    workers = [status, WorkerStatus(worker="n0/1")]
    rest = {"interval_s": 0.25, "workers": workers, "devices": [device], "device_readings": [reading]}
    return Heartbeat.model_validate({**ordinary, **rest, **fields})


SIGNAL_SAMPLES: list[Model] = [
    ProcessExited(**about_rank(), pid=7, exit_code=-9, last_output="the end"),
    RankRaised(**about_rank(), cause="exception", error="ValueError", detail="bad", traceback="Traceback ..."),
    RankCheckpointed(**about_rank(), path="/c"),
    RankFinished(**about_rank(), samples_sha256="abc", parameters_path="/p", loss=1.0),
    DeviceFailed(
        signal_id="s2", node="n0", incarnation="i", occurred_at=NOW, fault="xid-79", device=0, uuid="GPU-0",
        workers=["n0/0"], readings={"temperature_c": 50},
    ),
]  # fmt: skip

COMMAND_SAMPLES: list[Model] = [
    Prepare(command_id="c1", plan="p", task="gpt", generation=1, workers=["n0/0"], spec=parse_spec(SPEC)),
    OpenStore(command_id="c2", plan="p", task="gpt", generation=1),
    ConfigureTask(
        command_id="c3", plan="p", task="gpt", generation=1, stage=stage(1, ["n0/0"]), store_host="h", store_port=1
    ),
    ReleaseTask(command_id="c4", plan="p", task="gpt", generation=1, workers=["n0/0"], all_workers=True),
]

REPLY_SAMPLES: list[Model] = [
    Reply(command_id="c1", node="n0", ok=True, workers={"n0/0": WorkerResult(pid=7, phases={"rebuild": 0.1})}),
    Reply(command_id="c1", node="n0", ok=False, detail="no"),
]

LEAVING_SAMPLES: list[Model] = [Departure(node="n0", incarnation="i", reason="asked to end", drain_s=60.0)]
LEFT_SAMPLES: list[Model] = [DepartureAnswer(verdict="wait", detail="gpt")]
TEST_SAMPLES: list[Model] = [SelfTest(empty=True)]
TESTED_SAMPLES: list[Model] = [SelfTestResult(incarnation="i", problem="no space left")]

ILL: list[Any] = [
    None, True, False, 0, -1, 10**30, 10**400, 1e300, 5e-324, "", " ", "\0", "n\0", "a" * 5000, "../..", "*", ">",
    "a.b", "2026-01-01T00:00:00",
    "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "{}", [], {}, [[]], {"": {}},
    [0] * 50, float("nan"), float("inf"), float("-inf"), "NaN",
]  # fmt: skip
"""What is put in place of a part of an ordinary message."""

LONE_SURROGATE = "\ud800"


def document(message: Model) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(message.model_dump_json(by_alias=True))
    return parsed


def places(value: Any, so_far: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every part of a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [so_far, *(path for key, part in inner for path in places(part, (*so_far, key)))]


def exchanged(document: Any, path: tuple[Any, ...], value: Any, *, missing: bool = False) -> Any:
    """Return the document with another value at a path, or without it."""
    if not path:
        return value
    changed = copy.deepcopy(document)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    if missing:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return changed


_MAPPINGS = ("spec", "phases", "deal", "counters", "readings", "faults", "addresses", "gaps_s", "peers", "identity")
"""Fields whose keys are data, and the specification, which is read strictly."""


def extended(value: Any) -> Any:
    """Return a document with a plain and a nested field that no version knows, at every level that is an object."""
    if isinstance(value, list):
        return [extended(part) for part in value]
    if not isinstance(value, dict):
        return value
    inner = {key: part if key in _MAPPINGS else extended(part) for key, part in value.items()}
    if isinstance(workers := value.get("workers"), dict):  # a mapping by worker
        inner["workers"] = {worker: extended(part) for worker, part in workers.items()}
    return {**inner, "added_later": 1, "also_added": {"deep": [{"er": None}]}}


def ill_formed(samples: list[Model]) -> st.SearchStrategy[bytes]:
    """Draw bytes that may or may not be a message."""
    documents = [document(sample) for sample in samples]

    @st.composite
    def mutated(draw: st.DrawFn) -> bytes:
        chosen = draw(st.sampled_from(documents))
        path = draw(st.sampled_from(places(chosen)))
        value = draw(st.one_of(st.sampled_from(ILL), st.text(max_size=20), st.just(LONE_SURROGATE)))
        changed = exchanged(chosen, path, value, missing=bool(path) and draw(st.booleans()))
        data = json.dumps(changed, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
        return data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 9)) == 0 else data

    deep = st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"1" * 5_000, b'{"protocol":2}', b'{"kind":"later"}'])
    return st.one_of(mutated(), st.binary(max_size=200), deep)


def catalogue(samples: list[Model]) -> list[bytes]:
    """Return a few hundred fixed ones: every part of every sample exchanged for a few of ``ILL`` in turn."""
    found = [
        b"",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"9" * 5_000,
        b'{"protocol":2}',
        b'{"kind":"x"}',
    ]
    turn = 0
    for sample in samples:
        ordinary = document(sample)
        for path in places(ordinary)[1:]:
            found.append(json.dumps(exchanged(ordinary, path, None, missing=True)).encode())
            for _ in range(3):
                turn += 1
                found.append(json.dumps(exchanged(ordinary, path, ILL[turn % len(ILL)])).encode())
    return found
