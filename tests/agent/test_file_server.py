"""What an agent serves of its machine's files, and what it never does."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from safetensors.torch import load, save_file

from services.agent.agent import Agent
from services.agent.files import file_server, task_inputs
from services.agent.files.file_server import FileServer
from services.agent.files.rank_users import RankUsers
from services.agent.files.task_secrets import TaskSecrets
from shared.bus.connection import Bus
from shared.errors import NotFound, Unavailable, Undecodable
from shared.messages.joined_result import LENGTH
from shared.messages.node_files import (
    CHUNK_BYTES,
    FILES,
    LIST_LIMIT,
    CheckInputs,
    DescribeResult,
    FilesReply,
    InputProblem,
    ListMetrics,
    ListOutput,
    RankFile,
    ReadMetrics,
    ReadOutput,
    ReadResult,
    successful,
)
from shared.model import Model
from tests.agent.kit import WAIT_S, Driver, Ear
from tests.condition import until
from tests.local_bus import LocalBus
from tests.versions.kit import ILL, ill_formed

SECRET = "what nobody may read"

SAMPLES: list[Model] = [
    ListOutput(task="gpt", nodes=["n0"]),
    ReadOutput(task="gpt", generation=1, worker="n0/0", offset=0),
    ListMetrics(task="gpt", nodes=["n0"]),
    ReadMetrics(task="gpt", generation=1, worker="n0/0", offset=0),
    DescribeResult(task="gpt", generation=1),
    ReadResult(task="gpt", generation=1, offset=0),
    CheckInputs(data="/x", script="/y", vocabulary=300),
]

REPLIES = [
    FilesReply(files=[RankFile(generation=1, worker="n0/0", size_bytes=5)], more=True),
    FilesReply(size_bytes=5, version="5-1", sha256="0" * 64),
    FilesReply(problems=[InputProblem(field="data", problem="the file is empty", allowed="a text")]),
    FilesReply(ok=False, code="not-found", detail="no such file"),
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with the output and the result of a task, beside a file that is nobody's business."""
    folder = tmp_path / "run"
    (folder / "tasks" / "gpt" / "output").mkdir(parents=True)
    (folder / "tasks" / "gpt" / "output" / "1-n0-0.log").write_text("hello\n")
    (folder / "tasks" / "gpt" / "generation-1" / "result").mkdir(parents=True)
    (folder / "tasks" / "gpt" / "generation-1" / "result" / "parameters.safetensors").write_bytes(b"parameters")
    (folder / "tasks" / "gpt" / "generation-1" / "metrics").mkdir()
    (folder / "tasks" / "gpt" / "generation-1" / "metrics" / "n0-0.jsonl").write_text("{}\n")
    (folder / "tasks" / "other").mkdir()
    for path in (tmp_path / "secret.log", folder / "secret.log", folder / "tasks" / "other" / "1-n0-0.log"):
        path.write_text(SECRET)
    return folder


@pytest.fixture
async def server(bus: Bus, run_dir: Path) -> AsyncIterator[FileServer]:
    """The part of an agent that serves files."""
    started = FileServer(bus, "n0", run_dir, RankUsers(""), TaskSecrets())
    await started.start()
    yield started
    started.stop()


async def ask(bus: Bus, **request: Any) -> tuple[FilesReply, bytes]:
    data = json.dumps({"task": "gpt", **request}).encode()
    return successful(FILES.reply.decode(await bus.request(FILES.at("n0"), data, timeout_s=WAIT_S)))


async def test_an_agent_serves_what_its_ranks_print(bus: Bus, agent: Agent, ear: Ear, driver: Driver) -> None:
    await driver.prepare()

    async def is_printed() -> bool:
        reply, _ = await ask(bus, kind="list-output", nodes=["n0"])
        if not reply.files:
            return False
        assert [file.key for file in reply.files] == [(1, "n0/0"), (1, "n0/1")]
        _, data = await ask(bus, kind="read-output", generation=1, worker="n0/1", offset=2)
        return data == b"rank of gpt\n"

    await until(is_printed)


@pytest.mark.usefixtures("server")
async def test_listings_have_pages_in_order(bus: Bus, run_dir: Path) -> None:
    folder = run_dir / "tasks" / "gpt" / "output"
    for number in range(2, LIST_LIMIT + 5):
        (folder / f"{number}-n0-0.log").touch()
    for name in ("2-n1-0.log", "2-store-n0.log", "x-n0-0.log", "1-n0-0.txt", f"{'9' * 30}-n0-0.log", "-1-n0-0.log"):
        (folder / name).touch()
    (folder / "1-n0-7.log").mkdir()
    reply, _ = await ask(bus, kind="list-output", nodes=["n0"])
    assert reply.more
    assert [file.key for file in reply.files] == [(number, "n0/0") for number in range(1, LIST_LIMIT + 1)]
    assert reply.files[0].size_bytes == 6
    rest, _ = await ask(bus, kind="list-output", nodes=["n0", "n1"], after=[LIST_LIMIT, "n0/0"])
    assert not rest.more
    assert [file.generation for file in rest.files] == list(range(LIST_LIMIT + 1, LIST_LIMIT + 5))
    both, _ = await ask(bus, kind="list-output", nodes=["n1", "n0"], after=[1, "n0/0"])
    assert [file.worker for file in both.files[:2]] == ["n0/0", "n1/0"]
    none, _ = await ask(bus, kind="list-output", task="unknown", nodes=["n0"])
    assert (none.files, none.more) == ([], False)


@pytest.mark.usefixtures("server")
async def test_metrics_are_listed_by_generation_and_worker(bus: Bus, run_dir: Path) -> None:
    task = run_dir / "tasks" / "gpt"
    for name in (
        "generation-12/metrics/n1-3.jsonl",
        "generation-x/metrics/n0-0.jsonl",
        "generation-2/metrics/n0-0.txt",
    ):
        (task / name).parent.mkdir(parents=True)
        (task / name).touch()
    for name in ("2-linked", "generation-3", "generation-4/metrics"):  # neither through links
        (task / name).parent.mkdir(exist_ok=True)
        (task / name).symlink_to(task / "generation-1" / ("metrics" if "metrics" in name else ""))
    reply, _ = await ask(bus, kind="list-metrics", nodes=["n0", "n1"])
    assert [(file.key, file.size_bytes) for file in reply.files] == [((1, "n0/0"), 3), ((12, "n1/3"), 0)]
    reply, _ = await ask(bus, kind="list-metrics", nodes=["n0", "n1"], after=[1, "n0/0"])
    assert [file.key for file in reply.files] == [(12, "n1/3")]
    reply, _ = await ask(bus, kind="list-metrics", nodes=["n1"])
    assert [file.key for file in reply.files] == [(12, "n1/3")]
    reply, data = await ask(bus, kind="read-metrics", generation=1, worker="n0/0", offset=1)
    assert (reply.size_bytes, data) == (3, b"}\n")


@pytest.mark.usefixtures("server")
async def test_files_are_read_in_bounded_chunks(bus: Bus, run_dir: Path) -> None:
    path = run_dir / "tasks" / "gpt" / "output" / "1-n0-0.log"
    content = os.urandom(CHUNK_BYTES + 100)
    path.write_bytes(content)
    about = {"kind": "read-output", "generation": 1, "worker": "n0/0"}
    reply, data = await ask(bus, **about, offset=0)
    assert (reply.size_bytes, data) == (len(content), content[:CHUNK_BYTES])
    assert (await ask(bus, **about, offset=CHUNK_BYTES))[1] == content[CHUNK_BYTES:]
    assert (await ask(bus, **about, offset=10, limit=5))[1] == content[10:15]
    assert (await ask(bus, **about, offset=10**12))[1] == b""
    with pytest.raises(Unavailable, match="limit"):
        await ask(bus, **about, offset=0, limit=CHUNK_BYTES + 1)
    with pytest.raises(NotFound):
        await ask(bus, **{**about, "generation": 2}, offset=0)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("kind", ["read-output", "read-metrics", "describe-result", "read-result"])
async def test_nothing_outside_the_tasks_folder_is_read(bus: Bus, run_dir: Path, kind: str) -> None:
    """Not through a link in place of the file, of its folder or of the task's; neither pipes, folders nor devices."""
    request = {"kind": kind, "generation": 1}
    if kind == "read-output":
        request |= {"worker": "n0/0", "offset": 0}
        path = run_dir / "tasks" / "gpt" / "output" / "1-n0-0.log"
    elif kind == "read-metrics":
        request |= {"worker": "n0/0", "offset": 0}
        path = run_dir / "tasks" / "gpt" / "generation-1" / "metrics" / "n0-0.jsonl"
    else:
        request |= {"offset": 0} if kind == "read-result" else {}
        path = run_dir / "tasks" / "gpt" / "generation-1" / "result" / "parameters.safetensors"
    assert (await ask(bus, **request))[0].ok
    outside = run_dir.parent / "outside"
    outside.mkdir()
    (outside / path.name).write_text(SECRET)

    async def refused() -> None:
        with pytest.raises(NotFound):
            await ask(bus, **request)

    path.unlink()
    path.symlink_to(outside / path.name)
    await refused()
    path.unlink()
    path.mkdir()
    await refused()
    path.rmdir()
    os.mkfifo(path)
    await refused()
    path.unlink()
    path.symlink_to("/dev/zero")
    await refused()
    path.unlink()
    path.parent.rmdir()
    path.parent.symlink_to(outside, target_is_directory=True)
    await refused()
    path.parent.unlink()
    task = run_dir / "tasks" / "gpt"
    task.rename(run_dir.parent / "moved")
    relative = path.relative_to(task)
    (outside / relative).parent.mkdir(parents=True)
    (outside / relative).write_text(SECRET)
    task.symlink_to(outside, target_is_directory=True)
    await refused()


def write_several(folder: Path) -> dict[str, torch.Tensor]:
    """Write a result of three files in place of one; return its tensors."""
    (folder / "parameters.safetensors").unlink()
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor(7.0),
        "c": torch.arange(5, dtype=torch.bfloat16),
        "none": torch.zeros(0, 3, dtype=torch.bfloat16),
    }
    files = [["a"], ["b"], ["c", "none"]]
    index: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"parameters-{number:05d}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "parameters.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return tensors


@pytest.mark.usefixtures("server")
async def test_a_result_of_several_files_is_served_as_one(bus: Bus, run_dir: Path) -> None:
    folder = run_dir / "tasks" / "gpt" / "generation-1" / "result"
    tensors = write_several(folder)
    described, _ = await ask(bus, kind="describe-result", generation=1)
    chunks = [
        (await ask(bus, kind="read-result", generation=1, offset=offset, limit=7))[1]
        for offset in range(0, described.size_bytes or 0, 7)
    ]
    content = b"".join(chunks)
    assert len(content) == described.size_bytes
    assert hashlib.sha256(content).hexdigest() == described.sha256
    found = load(content)
    assert found.keys() == tensors.keys()
    assert all(found[name].equal(value) for name, value in tensors.items())

    part = folder / "parameters-00002-of-00003.safetensors"
    save_file({"b": torch.zeros(2)}, part)
    with pytest.raises(Unavailable, match="changed"):
        await ask(bus, kind="read-result", generation=1, offset=0, limit=len(content))
    assert (await ask(bus, kind="describe-result", generation=1))[0].version != described.version
    for content, problem in (
        (b"", "no header"),
        (b"\xff" * 16, "no header"),
        (LENGTH.pack(2) + b"{]", "cannot be read"),
    ):
        part.write_bytes(content)
        (folder / "parameters.safetensors.index.json").touch()
        with pytest.raises(Unavailable, match=problem):
            await ask(bus, kind="describe-result", generation=1)
    part.unlink()
    part.symlink_to(run_dir / "secret.log")
    with pytest.raises(NotFound):
        await ask(bus, kind="describe-result", generation=1)
    outside = {"x": "../../../../secret.log"}
    (folder / "parameters.safetensors.index.json").write_text(json.dumps({"weight_map": outside}))
    with pytest.raises(Unavailable, match="lists other files"):
        await ask(bus, kind="describe-result", generation=1)


NAMES = st.one_of(
    st.sampled_from(["..", "../..", "gpt/../other", "/", "/etc", "gpt\0", ".", "", "gpt/", "~", "%2e%2e", "gpt\n"]),
    st.text(alphabet="./g-pt0\\\n", max_size=12),
    st.sampled_from([value for value in ILL if not isinstance(value, float)]),
)


@given(
    kind=st.sampled_from(["read-output", "describe-result", "read-result", "list-output"]),
    task=NAMES,
    worker=st.one_of(NAMES, st.builds("{}/0".format, NAMES)),
    generation=st.one_of(st.just(1), NAMES),
)
@examples(deadline=None)
def test_no_name_leads_out_of_the_tasks_folders(
    folders: Path, kind: str, task: Any, worker: Any, generation: Any
) -> None:
    """Whatever is asked for, the answer has nothing of what lies elsewhere; and nothing but a reply comes back."""
    request: dict[str, Any] = {"kind": kind, "task": task, "generation": generation, "worker": worker, "offset": 0}
    request |= {"nodes": [worker]} if kind == "list-output" else {}
    answered = served(folders, json.dumps(request).encode())
    assert SECRET.encode() not in answered
    json.loads(answered.partition(b"\n")[0])


@given(message=ill_formed(SAMPLES))
@examples(deadline=None)
def test_whatever_comes_is_answered(folders: Path, message: bytes) -> None:
    reply = json.loads(served(folders, message).partition(b"\n")[0])
    assert reply["ok"] or reply["code"] in ("undecodable", "not-found", "unavailable")


@given(message=st.one_of(ill_formed([*REPLIES]), st.binary(max_size=100)), data=st.binary(max_size=20))
@examples(deadline=None)
def test_whatever_a_node_answers_is_a_reply_or_a_known_error(message: bytes, data: bytes) -> None:
    try:
        successful(FILES.reply.decode(message + b"\n" + data))
    except (NotFound, Unavailable, Undecodable):
        return


def test_data_of_any_bytes_follows_the_reply() -> None:
    data = b"\n\n{}\0" + bytes(range(256))
    assert FILES.reply.decode(FILES.reply.encode((REPLIES[0], data))) == (REPLIES[0], data)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory for property tests, with a secret in each folder above and beside the output."""
    root = tmp_path_factory.mktemp("folders")
    (root / "run" / "tasks" / "gpt" / "output").mkdir(parents=True)
    for folder in (root, root / "run", root / "run" / "tasks", root / "run" / "tasks" / "gpt"):
        for name in ("1-n0-0.log", "secret", "parameters.safetensors"):
            (folder / name).write_text(SECRET)
    return root / "run"


def served(run_dir: Path, message: bytes) -> bytes:
    bus = LocalBus()
    server = FileServer(bus, "n0", run_dir, RankUsers(""), TaskSecrets())

    async def ask() -> bytes:
        await server.start()
        return await bus.ask(FILES.at("n0"), message)

    try:
        return asyncio.run(ask())
    finally:
        server.stop()


async def test_a_file_system_that_hangs_delays_nobody_else(
    bus: Bus, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests wait for threads of their own, and further ones are refused once too many do."""
    hanging = threading.Event()
    monkeypatch.setattr(file_server, "MOST_WAITING", 3)

    def answer(_: Any) -> tuple[FilesReply, bytes]:
        hanging.wait(WAIT_S)
        return FilesReply(), b""

    monkeypatch.setattr(server._folders, "answer", answer)
    request = FILES.request.decode(SAMPLES[0].model_dump_json().encode())
    waiting = [asyncio.create_task(server.serve(request)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="under way"):
        successful(await server.serve(request))
    hanging.set()
    assert all(reply.ok for reply, _ in await asyncio.gather(*waiting))


def test_links_that_lead_out_of_the_allowed_directories_are_named(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside.py"
    allowed.mkdir()
    outside.write_text("print()\n")
    (allowed / "own.py").write_text("print()\n")
    (allowed / "link.py").symlink_to(outside)
    (allowed / "text").write_text("the cat\n")

    def fields(script: str, directories: list[str] | None) -> list[str]:
        request = CheckInputs(
            data=str(allowed / "text"), script=str(allowed / script), vocabulary=300, directories=directories
        )
        return [problem.field for problem in task_inputs.file_problems(request)]

    assert fields("own.py", [str(allowed)]) == []
    assert fields("link.py", [str(allowed)]) == ["script"]
    assert fields("own.py", [str(tmp_path / "other")]) == ["data", "script"]
    assert fields("link.py", None) == []
