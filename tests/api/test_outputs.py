"""Output of ranks on machines with a run directory each, read through the agents' part that serves files."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.agent.ranks.output_limits import OutputLimits
from services.api.output import logs, node_files
from services.api.output.node_files import NodeFiles
from shared.bus.connection import Bus
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, TaskStopped
from shared.log.journal import Journal
from shared.messages.node_files import CHUNK_BYTES, FILES
from shared.settings.model import Settings
from tests.api.kit import Server, Story, serving
from tests.api.node_machines import NodeMachines, write_output

TASK = "gpt"


@pytest.fixture
async def healed(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[Server]:
    """The gateway over the story of a task that has trained on workers n0/0, n0/1, n1/0 and n1/1."""
    story = Story(settings.run_dir / "log.db")
    story.running().process_exit().process_restored()
    story.log.close()
    async with serving(settings, bus, journal) as server:
        yield server


@pytest.fixture
async def nodes(machines: NodeMachines) -> NodeMachines:
    """Both nodes, with the output of the first processes and of the restarted one."""
    await machines.start("n0", "n1")
    for node in ("n0", "n1"):
        for slot in (0, 1):
            write_output(machines.run_dir(node), TASK, f"1-{node}-{slot}", f"first of {node}/{slot}\n")
    write_output(machines.run_dir("n1"), TASK, "3-n1-1", "restarted\nno end")
    return machines


ALL = [
    "n0/0 | first of n0/0",
    "n0/1 | first of n0/1",
    "n1/0 | first of n1/0",
    "n1/1 | first of n1/1",
    "n1/1 | restarted",
    "n1/1 | no end",
]


async def text(server: Server, **params: Any) -> list[str]:
    response = await server.http.get(f"/v1/tasks/{TASK}/logs", params=params)
    assert response.status_code == 200, response.text
    return response.text.splitlines()


@pytest.mark.usefixtures("nodes")
async def test_each_nodes_output_is_read_there(healed: Server) -> None:
    assert await text(healed) == ALL
    assert await text(healed, rank=3) == ["first of n1/1", "restarted", "no end"]
    response = await healed.http.get(f"/v1/tasks/{TASK}/logs?rank=1", headers={"Accept": "application/x-ndjson"})
    assert [json.loads(line) for line in response.text.splitlines()] == [
        {"worker": "n0/1", "generation": 1, "line": "first of n0/1"}
    ]


async def test_where_machines_share_the_run_directory_each_line_comes_once(
    healed: Server, machines: NodeMachines, tmp_path: Path
) -> None:
    for worker in ("n0-0", "n0-1", "n1-0", "n1-1"):
        write_output(tmp_path / "shared", TASK, f"1-{worker}", "printed\n")
    await machines.start("n0", "n1", run_dir=tmp_path / "shared")
    assert await text(healed) == [f"{w} | printed" for w in ("n0/0", "n0/1", "n1/0", "n1/1")]


async def silent(_: str, __: bytes) -> None:
    """Receive a request and never answer."""


def impatient_with(node: str, ask: Any) -> Any:
    """Return an ``ask`` that waits for one node for a short time only."""

    async def asking(self: NodeFiles, request: Any, timeout_s: float | None = None) -> Any:
        return await ask(self, request, 0.3 if self.name == node else timeout_s)

    return asking


@pytest.mark.parametrize("state", ["does not answer", "answers too late", "is lost"])
async def test_a_node_that_is_gone_is_named(
    healed: Server, machines: NodeMachines, bus: Bus, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether nobody listens there, or no answer comes; what the others have is answered all the same."""
    await machines.start("n0")
    for slot in (0, 1):
        write_output(machines.run_dir("n0"), TASK, f"1-n0-{slot}", "here\n")

    if state == "answers too late":
        await bus.listen(FILES.at("n1"), silent)
        monkeypatch.setattr(NodeFiles, "ask", impatient_with("n1", NodeFiles.ask))
        state = "does not answer"
    elif state == "is lost":
        recorded = await healed.append(
            ErrorDetected, incident="i9", kind=ErrorKind.NODE_LOST, severity=Severity.SEV1, node="n1",
            method=Method.NODE_HEALTH, detected_at="2025-03-01T12:05:00Z",
        )  # fmt: skip
        await healed.projected(recorded.position)
    problem = f"output of n1/0, n1/1 is on n1, which {state}"
    assert await text(healed) == ["n0/0 | here", "n0/1 | here", f"unicron: {problem}"]
    assert await text(healed, rank=3) == [f"unicron: output of n1/1 is on n1, which {state}"]
    response = await healed.http.get(f"/v1/tasks/{TASK}/logs", headers={"Accept": "application/x-ndjson"})
    assert json.loads(response.text.splitlines()[-1]) == {
        "workers": ["n1/0", "n1/1"], "node": "n1", "problem": problem
    }  # fmt: skip


async def test_the_other_nodes_are_asked_for_what_a_lost_one_wrote(healed: Server, machines: NodeMachines) -> None:
    """Two machines share a run directory, which the api's machine does not see."""
    await machines.start("n0")
    for node in ("n0", "n1"):
        for slot in (0, 1):
            write_output(machines.run_dir("n0"), TASK, f"1-{node}-{slot}", f"of {node}/{slot}\n")
    assert await text(healed) == [f"{w} | of {w}" for w in ("n0/0", "n0/1", "n1/0", "n1/1")]


async def test_large_and_odd_output_comes_whole(
    healed: Server, nodes: NodeMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_LINE_BYTES", 2 * CHUNK_BYTES)
    many = "".join(f"line {number}\n" for number in range(50_000))
    write_output(nodes.run_dir("n0"), TASK, "1-n0-0", many)
    write_output(nodes.run_dir("n0"), TASK, "1-n0-1", b"x" * (3 * CHUNK_BYTES) + b"\nbad \xff\xe2\x80\xa8 byte\r\n")
    response = await healed.http.get(f"/v1/tasks/{TASK}/logs", headers={"Accept": "application/x-ndjson"})
    lines = [json.loads(line) for line in response.content.split(b"\n") if line]
    of = {worker: [line["line"] for line in lines if line["worker"] == worker] for worker in ("n0/0", "n0/1")}
    assert "".join(f"{line}\n" for line in of["n0/0"]) == many
    assert of["n0/1"][-1] == "bad \ufffd\u2028 byte"
    assert "".join(of["n0/1"][:-1]) == "x" * (3 * CHUNK_BYTES)
    assert len(of["n0/1"]) > 2  # a line that never ends is divided


async def test_following_goes_on_while_a_node_comes_and_goes(
    healed: Server, nodes: NodeMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of a node that answers come meanwhile, and what was missed comes later."""
    monkeypatch.setattr(logs, "POLL_S", 0.05)
    lost = nodes.run_dir("n1") / "tasks" / TASK / "output" / "3-n1-1.log"
    other = nodes.run_dir("n0") / "tasks" / TASK / "output" / "1-n0-0.log"
    seen: list[str] = []

    def add(path: Path, line: str) -> None:
        with path.open("a") as file:
            file.write(line)

    gone = "unicron: output of n1/0, n1/1 is on n1, which does not answer"
    async with (
        asyncio.timeout(60),
        healed.http.stream("GET", f"/v1/tasks/{TASK}/logs", params={"follow": True}) as response,
    ):
        async for line in response.aiter_lines():
            seen.append(line)
            match line:
                case "n1/1 | restarted":
                    add(lost, " yet\n")
                case "n1/1 | no end yet":
                    nodes.away.add("n1")
                case _ if line == gone:
                    add(lost, "back\n")
                    add(other, "meanwhile\n")
                case "n0/0 | meanwhile":
                    nodes.away.clear()
                case "n1/1 | back":
                    await healed.append(TaskStopped, task=TASK, generation=3, step=99, path="")
    assert seen == [*ALL[:5], "n1/1 | no end yet", gone, "n0/0 | meanwhile", "n1/1 | back"]


async def test_a_link_out_of_the_tasks_folder_is_not_followed(healed: Server, nodes: NodeMachines) -> None:
    output: Path = nodes.run_dir("n0") / "tasks" / TASK / "output"
    secret = nodes.run_dir("n0") / "secret"
    secret.write_text("secret\n")
    (output / "1-n0-0.log").unlink()
    (output / "1-n0-0.log").symlink_to(secret)
    assert [line for line in await text(healed) if "n0/0" in line] == ["unicron: output of n0/0 is not on n0 any more"]


KEPT = "\n".join(["kept"] * 2000) + "\n"


def flood(path: Path) -> int:
    """Append a megabyte of lines, and free the beginning of the file as an agent does; return where data begin."""
    limits = OutputLimits(Settings(rank_output_bytes=8 * len(KEPT)), {})
    with path.open("ab") as file:
        file.write(b"old\n" * (1 << 18))
        file.write(KEPT.encode())
    assert limits._look({"p": path}) > 1 << 19
    with path.open("rb") as file:
        return os.lseek(file.fileno(), 0, os.SEEK_DATA)


async def test_output_beyond_the_limit_is_left_out_and_that_is_said(healed: Server, nodes: NodeMachines) -> None:
    path = write_output(nodes.run_dir("n1"), TASK, "3-n1-1", b"")
    begins = flood(path)
    lines = await text(healed, rank=3)
    assert lines[:2] == ["first of n1/1", f"unicron: {begins} bytes of output are left out: over the limit"]
    assert "\0" not in "".join(lines)
    assert lines[-2000:] == ["kept"] * 2000


async def test_following_goes_on_where_output_was_left_out(
    healed: Server, nodes: NodeMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.02)
    path = write_output(nodes.run_dir("n1"), TASK, "3-n1-1", b"early\n")
    async with asyncio.timeout(60), healed.http.stream("GET", f"/v1/tasks/{TASK}/logs?rank=3&follow=true") as answer:
        lines = answer.aiter_lines()
        while await anext(lines) != "early":
            pass
        left_out = flood(path) - len("early\n")
        assert await anext(lines) == f"unicron: {left_out} bytes of output are left out: over the limit"
        while (line := await anext(lines)) != "kept":
            assert line in ("old", "ld", "d", "")
        path.write_bytes(b"")
        with path.open("ab") as file:
            file.write(b"anew\n")
        found = [line]
        while found[-1] != "anew":
            found.append(await anext(lines))
        assert found[-2:] == ["unicron: the output before this is left out: over the limit", "anew"]


@pytest.mark.usefixtures("nodes")
async def test_the_last_lines_are_those_of_each_worker(healed: Server, nodes: NodeMachines) -> None:
    assert await text(healed, tail=1) == [*ALL[:3], ALL[5]]
    assert await text(healed, rank=3, tail=2) == ["restarted", "no end"]
    assert await text(healed, rank=3, tail=3) == await text(healed, rank=3, tail=9) == await text(healed, rank=3)
    assert await text(healed, tail=0) == []
    many = "".join(f"line {number}\n" for number in range(100_000))
    write_output(nodes.run_dir("n0"), TASK, "1-n0-0", many)
    assert len(many) > 3 * CHUNK_BYTES
    assert await text(healed, rank=0, tail=50_000) == many.splitlines()[-50_000:]


async def test_the_last_lines_reach_no_further_than_what_was_left_out(healed: Server, nodes: NodeMachines) -> None:
    begins = flood(write_output(nodes.run_dir("n1"), TASK, "3-n1-1", b""))
    assert await text(healed, rank=3, tail=3) == ["kept"] * 3
    lines = await text(healed, rank=3, tail=1_000_000)
    assert f"unicron: {begins} bytes of output are left out: over the limit" in lines


async def test_what_comes_follows_the_last_lines(
    healed: Server, nodes: NodeMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.02)
    path = nodes.run_dir("n1") / "tasks" / TASK / "output" / "3-n1-1.log"
    url = f"/v1/tasks/{TASK}/logs?rank=3&follow=true&tail=1"
    async with asyncio.timeout(60), healed.http.stream("GET", url) as answer:
        lines = answer.aiter_lines()
        with path.open("a") as file:
            file.write(" yet\nnext\n")
        found = [await anext(lines)]
        while found[-1] != "next":
            found.append(await anext(lines))
        assert found in (["no end yet", "next"], ["next"])  # the end of the line may have come before the first look
        write_output(nodes.run_dir("n1"), TASK, "4-n1-1", "anew\nand on\n")  # a process of a later generation
        assert [await anext(lines), await anext(lines)] == ["anew", "and on"]


async def test_who_follows_what_comes_fast_gets_whole_lines_of_the_newest(
    healed: Server, nodes: NodeMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.02)
    monkeypatch.setattr(node_files, "SHARED_S", 0.02)
    path = write_output(nodes.run_dir("n1"), TASK, "3-n1-1", "early\n")
    many = "".join(f"line {number:05}\n" for number in range(3000))
    url = f"/v1/tasks/{TASK}/logs?rank=3&follow=true&newest_bytes=5000"
    async with asyncio.timeout(60), healed.http.stream("GET", url) as answer:
        lines = answer.aiter_lines()
        while await anext(lines) != "early":
            pass
        with path.open("a") as file:
            file.write(many)
        left_out = len(many) - 5000
        why = "more than is shown while it is printed"
        assert await anext(lines) == f"unicron: {left_out} bytes of output are left out: {why}"
        found = [await anext(lines)]
        while found[-1] != "line 02999":
            found.append(await anext(lines))
    assert found == many[-5000:].splitlines()[1:], "the rest of a line is left out"


async def test_however_many_follow_a_node_is_asked_as_by_one(
    healed: Server, nodes: NodeMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of one look are kept for longer than the test takes: all others begin with them."""
    monkeypatch.setattr(node_files, "SHARED_S", 600.0)
    asked: list[str] = []
    ask = NodeFiles.ask

    async def counted(self: NodeFiles, request: Any, timeout_s: float | None = None) -> Any:
        asked.append(f"{self.name} {request.model_dump_json()}")
        return await ask(self, request, timeout_s)

    monkeypatch.setattr(NodeFiles, "ask", counted)

    async def first_lines(count: int) -> list[str]:
        url = f"/v1/tasks/{TASK}/logs?follow=true&newest_bytes=32768"
        async with healed.http.stream("GET", url) as answer:
            lines = answer.aiter_lines()
            return [await anext(lines) for _ in range(count)]

    async with asyncio.timeout(60):
        found = await asyncio.gather(*(first_lines(len(ALL) - 1) for _ in range(5)))
    assert found == [ALL[:-1]] * 5
    assert sorted(asked) == sorted(set(asked))
    assert len(asked) == 2 + 5, "a listing of each node, and each file once"
