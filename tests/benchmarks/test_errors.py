"""A benchmark whose server answers with errors, or whose rank fails, shows the error and leaves nothing behind."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks import chaos, embedded, endurance, main_job, recovery
from benchmarks.peers import systems
from benchmarks.ranks import RankFailed, run_ranks
from benchmarks.report import FAILED, Report, run
from cli.stack.stack import Stack
from tests.condition import until

PROBLEM = {
    "type": "urn:unicron:internal",
    "title": "internal",
    "status": 500,
    "code": "internal",
    "detail": "unexpected error: RuntimeError",
}


class Broken(BaseHTTPRequestHandler):
    """Answers everything with the problem document of an unexpected error."""

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.rfile.read(length)
        body = json.dumps(PROBLEM).encode()
        self.send_response(500)
        self.send_header("Content-Type", "application/problem+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def broken() -> Iterator[str]:
    """The address of a server that answers 500."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Broken)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def stopped(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stacks whose api is the broken server and whose nodes are files; which of them were stopped."""
    stopped: list[str] = []

    async def start(stack: Stack) -> None:
        stack.url = broken
        stack.run_dir.mkdir(parents=True)
        (stack.run_dir / "log.db").touch()

    async def stop(stack: Stack) -> None:
        stopped.append(stack.url)

    async def no_module(module: str, *arguments: str, **environment: str) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(Stack, "start", start)
    monkeypatch.setattr(Stack, "stop", stop)
    for module in (embedded, chaos, recovery):
        monkeypatch.setattr(module, "run_module", no_module)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return stopped


async def no_reference(spec: dict[str, Any], directory: Path) -> Path:
    return directory


CHAOS = SimpleNamespace(
    seed=1,
    faults=1,
    nodes=4,
    workers_per_node=1,
    steps=9,
    node_timeout_s=1.5,
    kinds=["kill"],
    directory=None,
    standby=False,
)
RECOVERY = SimpleNamespace(rounds=1, ranks=3, steps=150, systems=["unicron"], faults=["kill"], cache=None, folder=None)


@pytest.mark.parametrize(
    "measure",
    [
        partial(main_job.measure, 1, None),
        partial(endurance.measure, 1),
        partial(chaos.in_directory, CHAOS),  # type: ignore[arg-type]
        partial(recovery.in_folder, RECOVERY),  # type: ignore[arg-type]
    ],
    ids=["main_job", "endurance", "chaos", "recovery"],
)
def test_an_http_error_ends_it_and_nothing_is_left(
    measure: Any, stopped: list[str], broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "reference_of", no_reference)
    stream = io.StringIO()
    before = set(psutil.Process().net_connections("tcp"))
    assert run(measure, stream) == FAILED
    (line,) = (json.loads(line) for line in stream.getvalue().splitlines())
    assert line == {"line": "error", "code": "internal", "detail": PROBLEM["detail"]}
    assert stopped == [broken]
    assert list((tmp_path / "temporary").iterdir()) == []
    left = set(psutil.Process().net_connections("tcp")) - before
    assert [connection for connection in left if connection.status == psutil.CONN_ESTABLISHED] == []


async def test_a_node_is_not_brought_back_once_the_stack_stops(
    stopped: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes while a killed node is away; the stack would be stopped before the node is started."""
    monkeypatch.setattr(chaos, "reference_of", no_reference)
    started: list[str] = []

    async def start_node(stack: Stack, node: str) -> None:
        started.append(node)

    async def course(run: chaos.Chaos, specs: list[Any]) -> list[Any]:
        run._spawn(run._bring_back("n1", 0.05))
        raise RuntimeError("the course fails")

    async def slow_stop(stack: Stack) -> None:
        await asyncio.sleep(0.2)

    monkeypatch.setattr(Stack, "start_node", start_node)
    monkeypatch.setattr(Stack, "stop", slow_stop)
    monkeypatch.setattr(chaos.Chaos, "_course", course)
    with pytest.raises(RuntimeError, match="the course fails"):
        await chaos.in_directory(CHAOS, Report(io.StringIO()))  # type: ignore[arg-type]
    assert started == []


RANK = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
if os.environ["RANK"] == "0":
    while not (folder / "pid-1").exists():
        time.sleep(0.01)
    sys.exit("rank 0 has no data")
time.sleep(600)
"""


def test_a_failed_rank_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank_program.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    began = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 ended with 1: rank 0 has no data"):
        run_ranks("rank_program", [str(tmp_path)], tmp_path, 2)
    assert time.monotonic() - began < 50
    assert not psutil.pid_exists(int((tmp_path / "pid-1").read_text()))


async def test_a_cancelled_run_ends_its_launcher(tmp_path: Path) -> None:
    class Sleeper(systems.Launched):
        def _run(self, folder: Path, fault: str) -> dict[str, Any]:
            launcher = self._launch(folder, "sleeper", "-c", "import time; time.sleep(600)")
            (folder / "pid").write_text(f"{launcher.pid}\n")
            return self._until_ended(folder, [launcher])

    running = asyncio.create_task(Sleeper(1, Path(sys.executable)).run(tmp_path, ""))
    pid = tmp_path / "pid"
    await until(lambda: pid.exists() and pid.read_text().endswith("\n"))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not psutil.pid_exists(int(pid.read_text())))
