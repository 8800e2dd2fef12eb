"""Every route and every verb, over a log on SQLite and the same one on PostgreSQL, which is stricter about types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from shared.archive.restoration import restore
from shared.bus.connection import Bus
from shared.events.union import NodeAdopted, StateMoved
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.messages.admission import AGENT_RESTART, AgentRestart, AgentRestartResult
from shared.messages.injection import FAULTS, FaultRequest, FaultResult
from shared.messages.self_test import SELF_TEST, SelfTest, SelfTestResult
from shared.settings.model import Settings
from shared.tasks.code_archive import code_of, pack
from shared.tasks.specification import TaskState
from tests.api.kit import START, Server, serving
from tests.api.node_machines import NodeMachines, write_output
from tests.api.whole_history import DAY_S, whole_history
from tests.cli.conftest import call_unicron
from tests.cli.test_every_verb import command_of, commands, run, stopped
from tests.cli.test_limits import detector
from tests.cli.test_task_verbs import write_spec
from tests.planner.test_standalone import problem, task

DOCUMENT = json.loads((Path(__file__).parents[2] / "docs" / "openapi.json").read_text())
"""What a test of the gateway compares with its routes."""

LATER = START + timedelta(seconds=4 * DAY_S)
"""The present."""

LARGEST = 2**63 - 1

TOLD_BY = ("costs", "incidents", "metrics", "slow_workers", "troubles", "waf")
"""Routers that ask for the present time."""


class Opened(NamedTuple):
    """A gateway, what it has to do with, and the URL of its log."""

    server: Server
    bus: Bus
    log_url: str


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the history's backup."""
    folder = tmp_path_factory.mktemp("history")
    whole_history(folder)
    return folder / "backup"


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.slow), "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database of either kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'log.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the present be ``LATER``: the days up to today are no subject here."""
    for router in TOLD_BY:
        monkeypatch.setattr(f"services.api.routers.{router}.utc_now", lambda: LATER)


@pytest.fixture
async def opened(
    present: None,
    database: str,
    history: Path,
    settings: Settings,
    bus: Bus,
    machines: NodeMachines,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Opened]:
    """The gateway over the history, with agents of two nodes that do what they are asked."""
    monkeypatch.chdir(settings.run_dir)  # where the data of the tasks is
    async with opening(database, history, settings, bus) as server:
        await serve_nodes(machines, bus)
        await serve_agents(server, bus)
        yield Opened(server, bus, database)


async def serve_nodes(machines: NodeMachines, bus: Bus) -> None:
    """Serve the files of two nodes, and what a detector answers."""
    await machines.start("n0", "n1")
    write_output(machines.run_dir("n0"), "gpt", "1-n0-0", "hello\n")
    result = machines.run_dir("n0") / "tasks" / "succeeded" / "generation-1" / "result" / "parameters.safetensors"
    result.parent.mkdir(parents=True)
    result.write_bytes(b"parameters")
    await detector(bus, unknown=())


@asynccontextmanager
async def opening(url: str, history: Path, settings: Settings, bus: Bus) -> AsyncIterator[Server]:
    """Serve the history, restored to a database."""
    restore(history, url)
    changed = settings.model_copy(update={"log_url": url, "fault_injection": True})
    async with AsyncExitStack() as stack:
        log = stack.enter_context(closing(EventLog(url, clock=lambda: LATER)))
        journal = await stack.enter_async_context(Journal(log, bus))
        yield await stack.enter_async_context(serving(changed, bus, journal))


async def serve_agents(server: Server, bus: Bus) -> None:
    incarnations = {node["name"]: node["incarnation"] for node in (await server.http.get("/v1/nodes")).json()["items"]}

    async def inject(_: FaultRequest) -> FaultResult:
        return FaultResult(incarnation=incarnations["n1"])

    async def test(_: SelfTest) -> SelfTestResult:
        return SelfTestResult(incarnation=incarnations["n1"])

    async def hand_over(_: AgentRestart) -> AgentRestartResult:
        before, incarnations["n1"] = incarnations["n1"], f"after-{incarnations['n1']}"
        await server.append(NodeAdopted, node="n1", incarnation=incarnations["n1"], predecessor=before, agent_pid=77)
        return AgentRestartResult(incarnation=before)

    await bus.serve(FAULTS, inject, "n1")
    await bus.serve(SELF_TEST, test, "n1")
    await bus.serve(AGENT_RESTART, hand_over, "n1")


# ---- requests that read

PATHS: Mapping[str, Sequence[str]] = {
    "/v1/tasks/{name}": [
        "gpt", "pending", "queued", "transitioning", "degraded", "stopping", "refused", "stopped", "succeeded",
        "failed", "deleted", "again",
    ],
    "/v1/tasks/{name}/logs": ["gpt"],
    "/v1/tasks/{name}/attempts": ["gpt", "again"],
    "/v1/tasks/{name}/progress": ["gpt", "again"],
    "/v1/tasks/{name}/metrics": ["gpt", "again"],
    "/v1/tasks/{name}/result": ["succeeded"],
    "/v1/nodes/{name}": [f"n{number}" for number in range(6)],
    "/v1/incidents/{incident}": ["i0", "open", "of-failed"],
    "/v1/incidents/{incident}/postmortem": ["i0", "open", "of-failed"],
    "/v1/slow-workers/{slowdown}": ["slow-0", "slow-2"],
    "/v1/slow-workers/{slowdown}/postmortem": ["slow-0"],
    "/v1/plans/{plan}": ["start", "p0", "no-room", "answer", "stop-refused"],
    "/v1/limits/{task}": ["gpt"],
    "/v1/code/{digest}": ["0" * 64],
    "/open/{code}": ["unknown"],
}  # fmt: skip
"""Path -> what its last parameter may be."""

STATUSES = {"/open/unknown": 404, "/readyz": 503, "/v1/limits/gpt": 404, f"/v1/code/{'0' * 64}": 404}
"""Path -> the status of what is asked for there; else 200. No detector, planner or transition says that it is ready,
no detector knows the task, and no code has come along."""

NEEDED: Mapping[str, dict[str, Any]] = {
    "/v1/ids": {"kind": "incident"},
    "/v1/plan/throughput": {
        "layers": 2, "hidden": 32, "heads": 2, "sequence_length": 16, "global_batch": 8, "workers": 2,
        "hardware": "cpu", "tensor": 1, "pipeline": 1, "micro_batch": 1, "recompute": "none", "interleave": 1,
        "sequence_parallel": False, "distributed_optimizer": True, "overlap": False, "vocabulary": 257,
    },
}  # fmt: skip
"""Path -> the parameters that it needs."""

VALUES: Mapping[str, Sequence[Any]] = {
    "task": ["gpt", "unknown"],
    "type": ["task.submitted", "state.moved"],
    "prefix": ["", "i1", "%_\\"],
    "rank": [0],
    "from": [(START + timedelta(days=days)).isoformat() for days in (-1, 1, 4)],
}
"""Parameter -> values, where its type does not say which."""

TIMES = ("1970-01-01T00:00:00Z", START.isoformat(), (START + timedelta(days=2)).isoformat(), "8999-12-31T00:00:00Z")

COMPUTED = {"/v1/plan/throughput"}
"""Paths that ask no database."""

WITHOUT = {"follow", "min_position"}
"""Parameters that wait."""


def requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every path with each value of each parameter, one at a time; and the last of each in the other order."""
    for path, methods in DOCUMENT["paths"].items():
        if "get" not in methods:
            continue
        parameters = methods["get"].get("parameters", [])
        given = {p["name"]: values(p["name"], p["schema"]) for p in parameters if p["in"] == "query"}
        each: list[dict[str, Any]] = [{}]
        for name in sorted(given.keys() - WITHOUT) if path not in COMPUTED else ():
            each += [{name: value} for value in given[name]]
            if "order" in given:
                each.append({"order": "newest", name: given[name][-1]})
        first, *others = places(path)
        for one in each:
            yield first, {**NEEDED.get(path, {}), **one}
        for other in others:
            yield other, {}
    yield "/v1/events", {"type": ["state.moved", "task.submitted"], "last": 5, "since": TIMES[0]}


def places(path: str) -> list[str]:
    """Return the paths that a path with parameters stands for."""
    if "{" not in path:
        return [path]
    parts = path.split("{")
    return [parts[0] + value + parts[1].partition("}")[2] for value in PATHS[path]]


def values(name: str, schema: dict[str, Any]) -> list[Any]:
    """Return values of a parameter, those at the limits of its type among them."""
    if name in VALUES:
        return list(VALUES[name])
    if "$ref" in schema:
        return values(name, DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return [value for one in schema["anyOf"] if one.get("type") != "null" for value in values(name, one)]
    match schema:
        case {"enum": found}:
            return list(found)
        case {"const": found}:
            return [found]
        case {"type": "array", "items": items}:
            return values(name, items)
        case {"type": "boolean"}:
            return [False, True]
        case {"type": "integer", "minimum": least}:
            return [least, schema.get("maximum", LARGEST)]
        case {"format": "date-time"}:
            return list(TIMES)
    return []


async def ask(server: Server, path: str, parameters: dict[str, Any]) -> httpx.Response:
    """Ask, and check that the answer is the one that belongs to the path."""
    answer = await server.http.get(path, params=parameters)
    assert answer.status_code == STATUSES.get(path, 200), (path, parameters, answer.text)
    return answer


OF_THE_PROCESS = {"/healthz", "/metrics", "/readyz", "/v1/actor", "/v1/log/heads"}
"""Paths whose answers are of the process, not of the log."""


async def answers(server: Server) -> dict[tuple[str, str], httpx.Response]:
    """Return the answer to every request that reads."""
    async with server.http.stream("GET", "/v1/events", params={"follow": True, "after": 3}) as stream:
        ids = (line async for line in stream.aiter_lines() if line.startswith("id: "))
        assert await anext(ids) == "id: 4"
    return {(path, str(parameters)): await ask(server, path, parameters) for path, parameters in requests()}


@pytest.mark.slow
async def test_both_databases_answer_the_same(
    present: None, history: Path, postgres_url: str, settings: Settings, bus: Bus, machines: NodeMachines
) -> None:
    assert {*PATHS} == {path for path, methods in DOCUMENT["paths"].items() if "get" in methods and "{" in path}
    await serve_nodes(machines, bus)
    found = []
    for url in (f"sqlite:///{settings.run_dir / 'log.db'}", postgres_url):
        async with opening(url, history, settings, bus) as server:
            found.append(await answers(server))
    assert {item["state"] for item in found[0]["/v1/tasks", "{}"].json()["items"]} == {*TaskState}
    for asked, answer in found[0].items():
        if asked[0] in OF_THE_PROCESS:
            continue
        other = found[1][asked]
        if "json" in answer.headers["content-type"]:
            assert_same(answer.json(), other.json(), asked)
        else:
            assert answer.text == other.text, asked


def assert_same(one: Any, other: Any, asked: object) -> None:
    """Compare two documents. Databases may add up in another order: numbers differ by their last bits."""
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), asked
        for key, value in one.items():
            assert_same(value, other[key], (asked, key))
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other), asked
        for value, same in zip(one, other, strict=True):
            assert_same(value, same, asked)
    elif isinstance(one, float) and isinstance(other, float):
        assert one == pytest.approx(other, rel=1e-12, abs=1e-9), asked
    else:
        assert one == other, asked


# ---- requests that change something

ARCHIVE = pack(Path(__file__).parent, [Path(__file__).name])

CHANGES: Sequence[tuple[str, str, Any, int]] = (
    ("PUT", f"/v1/code/{code_of(ARCHIVE).digest}", ARCHIVE, 201),
    ("PUT", f"/v1/code/{code_of(ARCHIVE).digest}", ARCHIVE, 200),
    ("POST", "/v1/tasks", {"name": "second"}, 201),
    ("POST", "/v1/tasks", {"name": "second"}, 200),  # by its key
    ("PATCH", "/v1/tasks/gpt", {"weight": 2.0}, 200),
    ("POST", "/v1/tasks/gpt/faults", {"fault": "hang", "rank": 2, "step": 100}, 202),
    ("POST", "/v1/tasks/gpt/stop", None, 202),
    ("POST", "/v1/tasks/stopped/resume", None, 201),
    ("DELETE", "/v1/tasks/failed", None, 200),
    ("POST", "/v1/nodes/n1/faults", {"fault": "disconnect"}, 202),
    ("POST", "/v1/nodes/n1/cordon", {"reason": "a fan"}, 200),
    ("POST", "/v1/nodes/n1/return", None, 200),
    ("POST", "/v1/nodes/n1/drain", {}, 202),
    ("POST", "/v1/nodes/n1/reports", {"key": "drain", "severity": "warning"}, 202),
    ("POST", "/v1/nodes/n1/agent/restart", None, 202),
    ("POST", "/v1/incidents/open/notes", {"text": "the switch of rack 4"}, 201),
    ("POST", "/v1/incidents/open/acknowledge", None, 200),
    ("POST", "/v1/troubles/queue/acknowledge", None, 200),
    ("POST", "/v1/plan/solve", "problem", 200),
    ("POST", "/v1/browser-links", None, 201),
    ("DELETE", "/v1/browser-sessions", None, 200),
)
"""Method, path, body and status of the answer, one after the other."""


@pytest.mark.slow
async def test_every_change_is_made(opened: Opened) -> None:
    server = opened.server
    bodies = {"problem": json.loads(problem(task())), "second": server.spec("second")}
    for method, path, body, status in CHANGES:
        sent = bodies["second"] if path == "/v1/tasks" else bodies["problem"] if body == "problem" else body
        headers = {"Idempotency-Key": "one"} if path == "/v1/tasks" else {}
        if isinstance(sent, bytes):
            headers["Content-Type"] = "application/x-tar"
        content = {"content" if isinstance(sent, bytes) else "json": sent}
        answer = await server.http.request(method, path, headers=headers, **content)
        assert answer.status_code == status, (method, path, answer.text)
    changes = {
        (method.upper(), path)
        for path, methods in DOCUMENT["paths"].items()
        for method in methods
        if method not in {"get", "parameters"}
    }
    assert {
        operation for operation in changes if not any(is_at(*operation, *change[:2]) for change in CHANGES)
    } == set()
    # What ends long before what is settled: the fold gives up that time.
    recorded = await server.append(
        StateMoved, plan="answer", task="degraded", phase="restored", generation=3, complete=True, step=95,
        started_at=START, occurred_at=START + timedelta(seconds=1200),
    )  # fmt: skip
    await server.projected(recorded.position)
    assert (await ask(server, "/v1/costs", {})).json()["sum_check"]["ok"]


def is_at(method: str, path: str, given: str, place: str) -> bool:
    """Return whether a change is the operation of a method and a path with parameters."""
    parts, wanted = place.split("/"), path.split("/")
    fits = len(parts) == len(wanted) and all(w.startswith("{") or w == p for p, w in zip(parts, wanted, strict=True))
    return given == method and fits


# ---- verbs

NO_DATABASE = {
    ("up",), ("demo",), ("control",), ("agent",), ("doctor",), ("simulate",), ("plan", "solve"), ("plan", "throughput"),
    ("node", "add"), ("node", "remove"), ("keys", "make"), ("keys", "tls"), ("token", "add"), ("token", "list"),
    ("token", "remove"), ("run",), *(("watch", what) for what in ("cloud", "kubernetes", "machine", "slurm")),
}  # fmt: skip
"""Verbs that use no log and no gateway, or start what others here have started."""

READING = (
    ("top",),
    ("ps",),
    ("status",),
    *(("show", name) for name in PATHS["/v1/tasks/{name}"]),
    ("show", "again", "--attempts"),
    ("logs", "gpt"),
    ("metrics", "gpt"),
    ("metrics", "again", "--attempt", "1", "--against", "2"),
    ("result", "succeeded", "parameters"),
    ("wait", "succeeded"),
    ("nodes",),
    ("nodes", "--detector"),
    ("upgrade", "--check"),
    ("incidents",),
    ("incidents", "--task", "gpt", "--state", "closed"),
    ("incidents", "show", "open"),
    ("slow-workers",),
    ("postmortem", "i1"),
    ("postmortem", "slow-0"),
    ("plan", "list"),
    ("plan", "show", "answer"),
    ("events", "--last", "5"),
    ("cost", "--bucket", "day", "--to", "2025-03-04"),
    *(("export", what) for what in ("events", "incidents", "tasks", "cost", "plans")),
    ("open",),
)

NOT_ALL_WORK = {("status",): 1, ("upgrade", "--check"): 4}
"""Their exit status says that the other services do not run beside this gateway."""

CHANGING = (
    ("submit", "mine/spec.yaml"),
    ("change", "second", "--weight", "2.5"),
    ("incidents", "acknowledge", "open"),
    ("incidents", "note", "open", "the switch of rack 4"),
    ("inject", "gpt", "--fault", "hang", "--rank", "2", "--step", "100"),
    ("agent", "restart", "n1"),
    ("cordon", "n1"),
    ("return", "n1"),
    ("drain", "n1"),
    ("stop", "gpt"),
    ("kill", "degraded", "--yes"),
    ("resume", "stopped"),
    ("delete", "failed"),
)

OF_THE_LOG = (
    ("replay", "LOG"),
    ("replay", "LOG", "--at", "40"),
    ("backup", "backup", "--log", "LOG"),
    ("restore", "backup", "--log", "restored.db"),
    ("archive", "segments", "--log", "LOG", "--before", "50"),
)


async def test_every_verb_succeeds(opened: Opened, tmp_path: Path) -> None:
    given = {command_of(arguments) for arguments in (*READING, *CHANGING, *OF_THE_LOG)}
    assert {*commands()} - given == NO_DATABASE
    write_spec(tmp_path / "mine", name="second")
    for arguments in (*READING, *CHANGING):
        running = asyncio.ensure_future(call_unicron(*arguments, server=opened.server.url))
        if arguments[0] == "kill":
            await stopped(opened.server, "degraded")
        outcome = await running
        assert outcome.code == NOT_ALL_WORK.get(arguments, 0), (arguments, outcome.out, outcome.err)
    for arguments in OF_THE_LOG:
        place = [opened.log_url if argument == "LOG" else argument for argument in arguments]
        outcome = await asyncio.to_thread(run, *place)
        assert outcome.code == 0, (arguments, outcome.out, outcome.err)
