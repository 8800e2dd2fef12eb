"""Golden outputs of the verbs that ``test_widths`` has not: those that need no server, and those that change something.

And none is forgotten: every verb of the command has golden outputs, or a reason why it has none.
"""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, closing, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.doctor.measured import Facts, Nats
from cli.main import VERBS, load, main
from shared.bus.connection import Bus
from shared.events.union import NodeAdopted, TaskStopped
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.messages.admission import AGENT_RESTART, AgentRestart, AgentRestartResult
from shared.messages.injection import FAULTS, FaultRequest, FaultResult
from shared.messages.self_test import SELF_TEST, SelfTest, SelfTestResult
from shared.service import tokens
from shared.service.tokens import Scope
from shared.settings.model import Settings
from tests.api.kit import START, Server, Story, serving
from tests.cli import test_metrics, test_slow_workers, test_widths
from tests.cli.conftest import Outcome, call_unicron
from tests.cli.golden_outputs import COLUMNS, GOLDEN, compare, golden_files
from tests.cli.test_doctor import GOOD, peer
from tests.cli.test_simulate import TRACE
from tests.cli.test_task_verbs import write_spec
from tests.condition import until
from tests.logs.kit import golden_log, read_rows, restore
from tests.planner.test_standalone import problem, task

LOG = golden_log("demo")
"""The recorded log of a demo: its hashes are always the same, those of a story written by a test are not."""

HEAVY = {
    "layers": 96, "hidden": 12288, "heads": 96, "sequence-length": 2048, "global-batch": 1536, "workers": 1024,
    "tensor": 8, "pipeline": 8, "micro-batch": 1,
}  # fmt: skip
"""GPT-3 175B in one of the layouts that were published for it; sizes left open would be searched for seconds."""

LOCAL = {
    "doctor": ("doctor",),
    "run-check": (
        "run", "--check", "--", "torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", "--fp8-format", "hybrid",
        "--tp-comm-overlap",
    ),
    "token-list": ("token", "list", "--run-dir", "run"),
    "simulate": ("simulate", "--trace", "small.csv", "--jobs", "1"),
    "replay": ("replay", "log.db"),
    "replay-verify": ("replay", "log.db", "--verify"),
    "replay-what-if": ("replay", "log.db", "--what-if", "max_workers.demo-gpt-large=2"),
    "plan-solve": ("plan", "solve", "problem.json"),
    "plan-throughput": (
        "plan", "throughput", *itertools.chain(*((f"--{name}", str(value)) for name, value in HEAVY.items())),
    ),
    "keys-make": ("keys", "make", "--keys", "keys"),
    "keys-tls": ("keys", "tls", "control", "--keys", "keys"),
    "node-add": ("node", "add", "n0", "--keys", "keys"),
    "node-remove": ("node", "remove", "n0", "--keys", "keys"),
    "backup": ("backup", "backup", "--log", "log.db", "--format", "jsonl"),
    "restore": ("restore", "backup", "--log", "restored.db"),
    "archive": ("archive", "segments", "--log", "log.db", "--before", "50", "--format", "jsonl"),
}  # fmt: skip
"""Name of the golden outputs -> a verb that needs no server, and its arguments; one after the other in one folder."""

PROSE = {"replay", "replay-verify", "replay-what-if", "run-check"}
"""Lines about nodes, tasks and plans, or a task's settings, which a terminal breaks."""

CODES = {"doctor": 1}
"""Exit status of those that find something: else 0."""

LATER = START + timedelta(minutes=10)

CHANGING = {
    "submit": ("submit", "mine/spec.yaml"),
    "change": ("change", "second", "--weight", "2.5", "--max", "4"),
    "incidents-acknowledge": ("incidents", "acknowledge", "i1"),
    "incidents-note": ("incidents", "note", "i1", "the switch of rack 4"),
    "inject": ("inject", "gpt", "--fault", "hang", "--rank", "2", "--step", "98"),
    "agent-restart": ("agent", "restart", "n1"),
    "cordon": ("cordon", "n1"),
    "return": ("return", "n1"),
    "drain": ("drain", "n1"),
    "stop": ("stop", "gpt"),
    "kill": ("kill", "second", "--yes"),
    "resume": ("resume", "second"),
    "delete": ("delete", "gpt"),
}
"""Name of the golden outputs -> a verb that changes something, and its arguments; one after the other."""

WATCHED = ("cloud", "kubernetes", "machine", "slurm")

WITHOUT: dict[tuple[str, ...], str] = {
    ("up",): "starts a server",
    ("demo",): "starts a server; its tables are those of tests/cli/test_demo.py",
    ("control",): "starts a server",
    ("upgrade",): "its versions change with the program; tests/cli/test_upgrade.py",
    ("agent",): "runs an agent",
    ("open",): "prints a link, which is secret and never the same",
    ("token", "add"): "prints a token, which is secret and never the same",
    ("token", "remove"): "prints nothing",
    **{("watch", what): "asks another system; tests/cli/test_watch.py" for what in WATCHED},
    ("result",): "has a node send a file; its one line is in tests/cli/test_verbs.py",
}
"""Verb -> why it has no golden outputs."""


def commands() -> Iterator[tuple[str, ...]]:
    """Yield every command that can be run: a verb, or one of a group; a group that does something by itself, too."""
    for verb in VERBS:
        command = load(verb)
        inner = getattr(command, "commands", {})
        if not inner or command.invoke_without_command:
            yield (verb,)
        yield from ((verb, name) for name in inner)


def command_of(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command that some arguments run."""
    inner = getattr(load(arguments[0]), "commands", {})
    return arguments[: 2 if arguments[1:2] and arguments[1] in inner else 1]


def test_every_verb_has_golden_outputs_or_a_reason_why_not() -> None:
    recorded = {
        **test_widths.VERBS,
        **test_slow_workers.VERBS,
        **test_metrics.VERBS,
        **LOCAL,
        **CHANGING,
        "top": ("top",),
    }
    there = {command_of(arguments) for arguments in recorded.values()}
    assert sorted({*commands()} - there - WITHOUT.keys()) == []
    assert sorted(there & WITHOUT.keys()) == [], "a reason for what is not so"
    assert sorted(WITHOUT.keys() - {*commands()}) == []
    files = {path for name in recorded for path in golden_files(name)}
    assert {*GOLDEN.iterdir()} == files


def run(*arguments: str) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return Outcome(code, out.getvalue(), err.getvalue())


def clock_of(*, steps_s: float) -> Any:
    """Return a module of the time that a run takes, by which each reading is so much later: outputs have durations."""
    times = itertools.count(0.0, steps_s)
    return SimpleNamespace(perf_counter=times.__next__, monotonic=times.__next__)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of verbs that need no server, with what they read."""
    facts = {
        **GOOD.model_dump(),
        "clock_synchronised": False,
        "disk_free_bytes": 1 << 20,
        "nats": Nats(servers=["nats://control:4222"], problem="refused"),
        "peers": [peer("n1"), peer("n2"), peer("n3", 4e8)],
    }

    async def measure(*_: object) -> Facts:
        return Facts.model_validate(facts)

    monkeypatch.setattr("cli.doctor.measuring.measure", measure)
    monkeypatch.setattr("cli.planning.simulate.time", clock_of(steps_s=1.25))
    monkeypatch.setattr("shared.planning.standalone.time", clock_of(steps_s=0.025))
    monkeypatch.chdir(tmp_path)
    for name, scope in (("alice", Scope.SUBMIT), ("a" * 63, Scope.OPERATE)):
        tokens.add(Settings(run_dir=tmp_path / "run").token_file, name, scope, START)
    (tmp_path / "small.csv").write_text(TRACE)
    (tmp_path / "problem.json").write_bytes(problem(task(), task("b", faulted=True, current=16, weight=2.0)))
    restore(read_rows(LOG), tmp_path / "log.db")
    return tmp_path


@pytest.mark.parametrize("columns", [80, pytest.param(200, marks=pytest.mark.slow)])
def test_what_needs_no_server_prints_what_it_did(folder: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_COLUMNS", str(columns))
    for name, arguments in LOCAL.items():
        shown = run(*arguments)
        # Where a verb says where something is, so that it can be used from elsewhere, it is in the folder of the test.
        placed = Outcome(shown.code, shown.out.replace(str(folder), "/folder"), shown.err)
        compare(name, columns, placed, prose=name in PROSE, code=CODES.get(name, 0))


@pytest.fixture
async def operated(
    settings: Settings, bus: Bus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[Server]:
    """The gateway over the story of a process that was lost, with agents that do what they are asked.

    What is recorded from then on has the time ``LATER``.
    """
    story = Story(settings.run_dir / "log.db")
    story.running().process_exit().process_restored()
    incarnations = [record.event.incarnation for record in story.records if record.event.type == "node.joined"]
    story.log.close()
    token = tokens.add(settings.token_file, "alice", Scope.OPERATE, START)
    monkeypatch.setenv("UNICRON_TOKEN", token)  # who acts is in some outputs: not the user of this machine
    monkeypatch.setattr("cli.nodes.agent.time", clock_of(steps_s=1.25))
    monkeypatch.chdir(tmp_path)
    write_spec(tmp_path / "mine", name="second")
    changed = settings.model_copy(update={"fault_injection": True})
    async with AsyncExitStack() as stack:
        log = stack.enter_context(closing(EventLog(settings.log_database_url, clock=lambda: LATER)))
        journal = await stack.enter_async_context(Journal(log, bus))
        server = await stack.enter_async_context(serving(changed, bus, journal))

        async def inject(_: FaultRequest) -> FaultResult:
            return FaultResult(incarnation=incarnations[1])

        async def test(_: SelfTest) -> SelfTestResult:
            return SelfTestResult(incarnation="next")

        async def hand_over(_: AgentRestart) -> AgentRestartResult:
            await server.append(NodeAdopted, node="n1", incarnation="next", predecessor=incarnations[1], agent_pid=77)
            return AgentRestartResult(incarnation=incarnations[1])

        await bus.serve(FAULTS, inject, "n1")
        await bus.serve(SELF_TEST, test, "n1")
        await bus.serve(AGENT_RESTART, hand_over, "n1")
        yield server


async def stopped(server: Server, task: str) -> None:
    """End a task that is being stopped, as the other services would."""

    async def asked() -> bool:
        return bool((await server.http.get(f"/v1/tasks/{task}")).json()["state"] == "stopping")

    await until(asked)
    recorded = await server.append(TaskStopped, task=task, generation=3, step=95, path="/shared/gpt/step-95")
    await server.projected(recorded.position)


@pytest.mark.parametrize("columns", COLUMNS)
async def test_what_changes_something_says_what(
    operated: Server, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNICRON_COLUMNS", str(columns))
    for name, arguments in CHANGING.items():
        if name == "delete":
            await stopped(operated, "gpt")
        running = asyncio.ensure_future(call_unicron(*arguments, server=operated.url))
        if name == "kill":
            await stopped(operated, "second")
        compare(name, columns, await running)
