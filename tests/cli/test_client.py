"""The Python client against a real gateway, and the example of its page."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
import yaml

from shared.errors import AnswerLost, Conflict, InvalidInput, NotFound, Unauthenticated, Unavailable, Undecodable
from shared.events.union import TaskFailed, TaskFinished
from shared.interface.models import EventRecord, Incident, Stopping, Task
from shared.tasks import specification
from shared.tasks.specification import TaskSpec, TaskState, parse_spec
from tests.api.kit import Server
from tests.api.node_machines import NodeMachines, write_output
from tests.cli.conftest import Unicron
from tests.condition import until
from unicron_client import Client, TimedOut
from unicron_client.answers import typed
from unicron_client.output import MissingOutput, OutputLine
from unicron_client.resources import ENDED

T = TypeVar("T")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "client.md"


async def ask(server: Server, question: Callable[[Client], T]) -> T:
    """Ask in a thread, as a program without an event loop does."""

    def run() -> T:
        with Client(server.url) as client:
            return question(client)

    return await asyncio.to_thread(run)


async def test_a_specification_is_a_file_a_mapping_or_a_model(
    api: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "gpt.yaml").write_text(yaml.safe_dump(api.spec("a", data="corpus.txt")))
    first = await ask(api, lambda client: client.submit("mine/gpt.yaml"))
    second = await ask(api, lambda client: client.submit(api.spec("b", data="corpus.txt")))
    third = await ask(api, lambda client: client.submit(parse_spec(api.spec("c"))))
    assert [type(task) for task in (first, second, third)] == [Task] * 3
    assert first.spec.data == str(tmp_path / "mine" / "corpus.txt")
    assert second.spec.data == str(tmp_path / "corpus.txt")
    assert await ask(api, lambda client: client.task("a")) == first
    assert [task.name for task in await ask(api, lambda client: [*client.tasks()])] == ["a", "b", "c"]
    newest = await ask(api, lambda client: [*client.tasks([TaskState.PENDING], newest_first=True)])
    assert [task.name for task in newest] == ["c", "b", "a"]
    assert await ask(api, lambda client: [*client.tasks(["failed"])]) == []


@contextlib.contextmanager
def losing_answers(url: str, *, forwards: bool) -> Iterator[str]:
    """Serve an address behind which answers to POST are lost: passed on to a server, or not."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = httpx.get(url + self.path)
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if forwards:
                headers = {"Content-Type": self.headers["Content-Type"]}
                httpx.post(url + self.path, content=body, headers=headers).raise_for_status()
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as lossy:
        serving = threading.Thread(target=lossy.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{lossy.server_port}"
        lossy.shutdown()
        serving.join()


@pytest.mark.parametrize("forwards", [True, False])
async def test_a_lost_answer_says_what_the_server_has(forwards: bool, api: Server) -> None:
    def submit() -> str:
        with losing_answers(api.url, forwards=forwards) as url, Client(url) as client:
            with pytest.raises(AnswerLost) as lost:
                client.submit(api.spec("gpt"))
            with pytest.raises(AnswerLost, match="may be recorded"):
                client.post("/v1/tasks/gpt/stop", {})
        return lost.value.detail

    said = await asyncio.to_thread(submit)
    there = "the server has a task gpt, pending, submitted at 20" in said
    assert ("may be recorded" in said, there, said.endswith("has no task gpt")) == (True, forwards, not forwards)


async def test_a_key_submits_once(api: Server) -> None:
    first = await ask(api, lambda client: client.submit(api.spec(), key="k"))
    assert await ask(api, lambda client: client.submit(api.spec(), key="k")) == first
    with pytest.raises(Conflict, match=r"key 'k' was used .*: steps was 100, is 7") as refused:
        await ask(api, lambda client: client.submit(api.spec(steps=7), key="k"))
    assert refused.value.extra["differences"] == ["steps was 100, is 7"]


async def test_the_command_says_that_nothing_new_was_started(api: Server, unicron: Unicron, tmp_path: Path) -> None:
    file = tmp_path / "gpt.yaml"
    file.write_text(yaml.safe_dump(api.spec()))
    first = await unicron("submit", str(file), "--key", "k")
    assert (first.code, first.out, first.err) == (0, "submitted gpt (pending)\n", "")
    again = await unicron("submit", str(file), "--key", "k")
    assert (again.code, again.out) == (0, "")
    said = r"gpt: already submitted at \d{4}-.* UTC with this key; nothing new was started \(pending, step 0 of 100\)\n"
    assert re.fullmatch(said, again.err)
    file.write_text(yaml.safe_dump(api.spec(steps=7)))
    other = await unicron("submit", str(file), "--key", "k")
    assert (other.code, other.out) == (4, "")
    assert "'k' was used for another specification of 'gpt': steps was 100, is 7" in other.err


async def test_errors_are_those_of_the_project(api: Server) -> None:
    with pytest.raises(NotFound, match="no task named 'gpt'"):
        await ask(api, lambda client: client.task("gpt"))
    with pytest.raises(InvalidInput, match="stepps: unknown field; did you mean 'steps'"):
        await ask(api, lambda client: client.submit(api.spec(stepps=1)))
    with pytest.raises(InvalidInput, match=r"cannot read nowhere\.yaml"):
        await ask(api, lambda client: client.submit("nowhere.yaml"))
    with Client("http://127.0.0.1:9") as client, pytest.raises(Unavailable):
        client.task("gpt")
    with pytest.raises(Undecodable, match="one version"):
        typed(TaskSpec, {"name": "gpt"})


async def test_a_token_is_sent(api: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNICRON_TOKEN", raising=False)

    def asking() -> None:
        with Client(api.url, token="of-nobody") as client:
            client.task("gpt")

    with pytest.raises(Unauthenticated):
        await asyncio.to_thread(asking)


async def test_waiting_ends_with_the_state_the_end_or_the_limit(api: Server) -> None:
    for name in ("a", "b"):
        await ask(api, lambda client, name=name: client.submit(api.spec(name)))  # type: ignore[misc]
    assert (await ask(api, lambda client: client.wait("a", {"pending"}))).state is TaskState.PENDING
    with pytest.raises(TimedOut, match=r"^waited 0 s in vain for a to end: it is pending at step 0 of 100 \(waiting"):
        await ask(api, lambda client: client.wait("a", timeout_s=0))
    with pytest.raises(TimedOut, match=r"^waited 0 s in vain for a to be running or to end: it is pending at"):
        await ask(api, lambda client: client.wait("a", {"running"}, timeout_s=0))
    waiting = asyncio.ensure_future(ask(api, lambda client: client.wait("a", poll_s=0.05)))
    await api.append(TaskFinished, task="a", generation=1, step=100, samples_sha256="a", parameters_path="/p")
    assert (await waiting).state is TaskState.SUCCEEDED
    await api.append(TaskFailed, task="b", generation=1, step=3, reason="it is broken")
    assert (await ask(api, lambda client: client.wait("b"))).reason == "it is broken"
    with pytest.raises(Conflict, match="has ended: failed, it is broken"):
        await ask(api, lambda client: client.wait("b", {"running"}))
    assert {state.value for state in specification.ENDED} == ENDED


async def test_what_a_healed_cluster_has(healed: Server, machines: NodeMachines) -> None:
    await machines.start("n0")
    write_output(machines.run_dir("n0"), "gpt", "1-n0-0", "step 1\nstep 2\n")
    write_output(machines.run_dir("n0"), "gpt", "1-n0-1", "")
    lines = await ask(healed, lambda client: [*client.logs("gpt")])
    assert [line.line for line in lines if isinstance(line, OutputLine)] == ["step 1", "step 2"]
    assert {line.node for line in lines if isinstance(line, MissingOutput)} == {"n1"}
    (incident,) = await ask(healed, lambda client: [*client.incidents(task="gpt")])
    assert isinstance(incident, Incident)
    assert (await ask(healed, lambda client: client.incident(incident.id))).id == incident.id
    assert await ask(healed, lambda client: [*client.incidents(task="other")]) == []
    records = await ask(healed, lambda client: [*client.events(after=2)])
    assert [record.position for record in records] == [*range(3, healed.journal.log.last_position() + 1)]

    def first_three(client: Client) -> list[EventRecord]:
        followed = client.events(follow=True)
        return [next(followed) for _ in range(3)]

    assert [record.position for record in await ask(healed, first_three)] == [1, 2, 3]
    assert (await ask(healed, lambda client: client.cost())).allocated_worker_s > 0
    stopping = await ask(healed, lambda client: client.stop("gpt"))
    assert (type(stopping), stopping.state) == (Stopping, TaskState.STOPPING)


async def test_the_example_of_the_page(
    api: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "gpt.yaml").write_text(yaml.safe_dump(api.spec()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNICRON_SERVER", api.url)
    running = asyncio.ensure_future(asyncio.to_thread(exec, compile(example, str(PAGE), "exec"), {}))

    async def submitted() -> bool:
        return api.journal.log.last_position() == 1

    await until(submitted)
    await api.append(TaskFinished, task="gpt", generation=1, step=100, samples_sha256="a", parameters_path="/p")
    await running
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "gpt succeeded at step 100"
    assert shown[1:3] == ["1 task.submitted", "2 task.finished"]
    assert shown[-1] == "worker-seconds: 0.0"
