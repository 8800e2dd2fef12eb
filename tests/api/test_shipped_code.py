"""The code that comes along with tasks: sent to the api, fetched and unpacked by the nodes that run it, removed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine, text

from services.agent.files import shipped_code as on_nodes
from services.agent.files.file_server import FileServer
from services.agent.files.rank_users import RankUsers
from services.agent.files.shipped_code import ShippedCode
from services.agent.files.task_files import TaskFiles
from services.agent.files.task_secrets import TaskSecrets
from services.api import main
from services.api.gateway import Gateway
from services.api.submission import shipped_code
from services.api.submission.code_store import CodeStore, Kept
from services.api.submission.shipped_code import KEPT_UNUSED_S
from shared.bus.connection import Bus
from shared.errors import Unavailable
from shared.events.plans import Response, TaskChange, Trigger
from shared.events.union import PlanDecided, TaskDeleted, TaskFailed
from shared.log.journal import Journal
from shared.messages.node_files import CHUNK_BYTES
from shared.service.tokens import Scope
from shared.settings.model import Settings
from shared.tasks.code import Code
from shared.tasks.code_archive import code_of, pack
from shared.tasks.specification import TaskSpec, parse_spec
from tests.api.kit import Server, bearer, serving, spec_dict, stage
from tests.api.test_tasks import refused
from unicron.protocol import environment

KIND = {"Content-Type": "application/x-tar"}


@pytest.fixture
def archive(tmp_path: Path) -> bytes:
    """The code of a task; one piece is not enough for it."""
    folder = tmp_path / "mine"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text("import lib.model\n")
    (folder / "lib" / "model.py").write_text("layers = 2\n")
    (folder / "lib" / "table").write_bytes(os.urandom(2 * CHUNK_BYTES))
    return pack(folder, ["train.py", "lib/model.py", "lib/table"])


@pytest.fixture
def code(archive: bytes) -> Code:
    """What a specification says of it."""
    return code_of(archive)


def shipped(code: Code, name: str = "gpt", **changes: Any) -> dict[str, Any]:
    return spec_dict(name, script="train.py", data="train.py", code=code.model_dump(), **changes)


async def send(api: Server, archive: bytes, digest: str, **headers: str) -> httpx.Response:
    return await api.http.put(f"/v1/code/{digest}", content=archive, headers=KIND | headers)


@pytest.fixture
def node(bus: Bus, tmp_path: Path, present: set[str]) -> ShippedCode:
    """A node that lacks the code, and whose operator allows it."""
    return ShippedCode(bus, "n0", files(tmp_path), RankUsers(""), lambda: present, allowed=True)


@pytest.fixture
def present() -> set[str]:
    """The tasks with processes on the node."""
    return set()


def files(tmp_path: Path) -> TaskFiles:
    return TaskFiles(tmp_path / "node", "n0", RankUsers(""))


@pytest.fixture(autouse=True)
def unlocked(tmp_path: Path) -> Iterator[None]:
    """Let what a node has unpacked be deleted."""
    yield
    for place, _, _ in os.walk(tmp_path):
        os.chmod(place, 0o700)


async def submit(api: Server, code: Code, archive: bytes, name: str = "gpt") -> TaskSpec:
    """Send code, and submit a task with it, which a plan has on node n0."""
    assert (await send(api, archive, code.digest)).status_code in (200, 201)
    answer = await api.http.post("/v1/tasks", json=shipped(code, name))
    assert answer.status_code == 201, answer.text
    change = TaskChange(
        task=name,
        reason="submitted",
        action="move",
        from_generation=0,
        prepare=["n0/0"],
        target=stage(1, ["n0/0"], source="initial"),
    )
    plan = {"plan": f"p-{name}", "trigger": Trigger.TASK_SUBMITTED, "cause": "c", "response": Response.RECONFIGURE}
    await api.projected((await api.append(PlanDecided, **plan, changes=[change])).position)
    return parse_spec(answer.json()["spec"])


async def test_a_node_that_lacks_the_code_of_a_task_fetches_and_unpacks_it(
    api: Server, code: Code, archive: bytes, node: ShippedCode, present: set[str], tmp_path: Path
) -> None:
    spec = await submit(api, code, archive)
    assert (spec.script, spec.data, spec.code) == ("train.py", "train.py", code)
    env = {"UNICRON_WORKING_DIRECTORY": "lib", "PYTHONPATH": "lib:/opt/lib"}
    found = await node.environment("gpt", spec.model_copy(update={"env": env}))
    folder = tmp_path / "node" / "tasks" / "gpt" / "code" / "n0" / code.digest
    assert found == {
        environment.CODE_DIGEST: code.digest,
        environment.CODE_DIRECTORY: str(folder),
        environment.WORKING_DIRECTORY: str(folder / "lib"),
        environment.SEARCH_PATH: f"{folder / 'lib'}:/opt/lib",
    }
    assert (folder / "lib" / "model.py").read_text() == "layers = 2\n"
    assert (folder / "lib" / "table").read_bytes() == (tmp_path / "mine" / "lib" / "table").read_bytes()
    present.add("gpt")
    await node.forget("gpt")
    assert folder.is_dir()  # a process of the task has started meanwhile
    present.clear()
    await node.forget()
    assert not folder.parent.exists()


async def test_what_has_come_in_another_form_is_refused_and_not_unpacked(
    api: Server, settings: Settings, code: Code, archive: bytes, node: ShippedCode, tmp_path: Path
) -> None:
    spec = await submit(api, code, archive)
    other = await node.environment("gpt", spec.model_copy(update={"code": code.model_copy(update={"files": 7})}))
    assert f"the specification says 7 files, {len(archive)} bytes" in other[environment.CODE_REFUSED]
    engine = create_engine(f"sqlite:///{settings.run_dir / 'code.db'}")
    with engine.begin() as connection:
        connection.execute(text("UPDATE code_pieces SET content = zeroblob(length(content)) WHERE number = 1"))
    assert f"does not have the digest {code.digest}" in (await node.environment("gpt", spec))[environment.CODE_REFUSED]
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM code_pieces"))
    engine.dispose()
    assert "is not kept" in (await node.environment("gpt", spec))[environment.CODE_REFUSED]
    assert not (tmp_path / "node" / "tasks" / "gpt" / "code" / "n0").exists()


async def test_a_node_gets_the_code_of_tasks_that_are_planned_there_and_runs_it_if_its_operator_allows_it(
    api: Server,
    bus: Bus,
    code: Code,
    archive: bytes,
    node: ShippedCode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(on_nodes, "FETCH_LIMIT_S", 0.0)
    spec = await submit(api, code, archive)
    elsewhere = ShippedCode(bus, "n1", files(tmp_path), RankUsers(""), set, allowed=True)
    with pytest.raises(Unavailable, match="no plan has task 'gpt' on node n1"):
        await elsewhere.environment("gpt", spec)
    with pytest.raises(Unavailable, match="no task 'other' with code is known here"):
        await node.environment("other", spec)
    careful = ShippedCode(bus, "n0", files(tmp_path), RankUsers(""), set, allowed=False)
    assert await careful.environment("gpt", spec) == {environment.CODE_REFUSED: on_nodes.NOT_ALLOWED}
    assert await careful.environment("gpt", spec.model_copy(update={"code": None})) == {}


async def test_a_node_does_not_follow_what_a_task_has_put_there(
    api: Server, code: Code, archive: bytes, node: ShippedCode, tmp_path: Path
) -> None:
    spec = await submit(api, code, archive)
    (tmp_path / "precious").mkdir(mode=0o750)
    (tmp_path / "precious" / "file").touch()
    files(tmp_path).make_output_folder("gpt")
    (tmp_path / "node" / "tasks" / "gpt" / "code").symlink_to(tmp_path / "precious")
    with pytest.raises(Unavailable, match="is no folder of this agent's"):
        await node.environment("gpt", spec)
    await node.forget("gpt")
    assert [path.name for path in (tmp_path / "precious").iterdir()] == ["file"]
    assert (tmp_path / "precious").stat().st_mode & 0o777 == 0o750


async def test_code_is_for_those_who_have_sent_it_and_for_operators(
    api: Server, settings: Settings, code: Code, archive: bytes
) -> None:
    alice, bob, reader = (bearer(settings, scope) for scope in (Scope.SUBMIT, Scope.SUBMIT, Scope.READ))
    path = f"/v1/code/{code.digest}"
    refused(await send(api, archive, code.digest, **reader), 403, "forbidden")
    refused(await api.http.get(path), 404, "not-found")
    refused(await api.http.post("/v1/tasks", json=shipped(code)), 422, "invalid-input")
    assert (await send(api, archive, code.digest, **alice)).status_code == 201
    assert (await send(api, archive, code.digest, **alice)).json() == code.model_dump()
    for who, status in ((alice, 200), (bob, 403), (reader, 403), ({}, 200)):
        answer = await api.http.get(path, headers=who)
        assert (answer.status_code, answer.content == archive) == (status, status == 200)
    # Who knows the digest, which is in the log, cannot have the code run and read there.
    refused(await api.http.post("/v1/tasks", json=shipped(code), headers=bob), 403, "forbidden")
    wrong = shipped(code.model_copy(update={"files": 2}))
    refused(await api.http.post("/v1/tasks", json=wrong, headers=alice), 422, "invalid-input")
    # Nobody has to allow the path of a script that comes along; that of other data somebody has.
    refused(
        await api.http.post("/v1/tasks", json=shipped(code) | {"data": "/etc/a"}, headers=alice), 422, "invalid-input"
    )
    assert (await api.http.post("/v1/tasks", json=shipped(code), headers=alice)).status_code == 201
    assert (await send(api, archive, code.digest, **bob)).status_code == 200
    assert (await api.http.post("/v1/tasks", json=shipped(code, "bobs"), headers=bob)).status_code == 201


async def test_what_is_no_code_is_not_kept(
    api: Server, code: Code, archive: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for content in (b"no archive", archive[:-512]):
        refused(await send(api, content, code.digest), 422, "invalid-input")
    refused(await send(api, archive, "0" * 64), 422, "invalid-input")
    refused(
        await send(api, archive, code.digest, **{"Content-Type": "application/octet-stream"}),
        415,
        "unsupported-content-type",
    )
    refused(await send(api, bytes((32 << 20) + 1), code.digest), 413, "too-large")
    monkeypatch.setattr(shipped_code, "MOST_SENT_BYTES", len(archive) - 1)
    refused(await send(api, archive, code.digest), 409, "conflict")
    refused(await api.http.get(f"/v1/code/{code.digest}"), 404, "not-found")


async def test_a_node_that_does_not_allow_it_is_named_at_submission(
    api: Server, bus: Bus, code: Code, archive: bytes, tmp_path: Path
) -> None:
    await send(api, archive, code.digest)
    server = FileServer(bus, "n0", tmp_path / "node", RankUsers(""), TaskSecrets())
    await server.start()
    await api.join("n0")
    problem = refused(await api.http.post("/v1/tasks", json=shipped(code)), 422, "invalid-input")
    assert problem["errors"][0]["field"] == "code"
    assert "UNICRON_ALLOW_SHIPPED_CODE=true on n0" in problem["detail"]
    server._ships = True
    assert (await api.http.post("/v1/tasks", json=shipped(code))).status_code == 201
    server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[CodeStore, list[float]]]:
    """What keeps code in a database of either kind, and its time in seconds."""
    sqlite = request.param == "sqlite"
    url = f"sqlite:///{tmp_path / 'code.db'}" if sqlite else str(request.getfixturevalue("postgres_url"))
    now = [1000.0]
    made = CodeStore(url, lambda: now[0])
    yield made, now
    made.close()


def test_databases_keep_it_alike(
    store: tuple[CodeStore, list[float]], code: Code, archive: bytes, tmp_path: Path
) -> None:
    kept, now = store
    assert [kept.put(code, archive, actor) for actor in ("a", "b", "a")] == [True, False, False]
    assert kept.kept(code.digest) == Kept(code, frozenset({"a", "b"}))
    assert kept.sent_bytes("b") == len(archive)
    assert kept.sent_bytes("c") == 0
    pieces = [kept.piece(code.digest, begin) or b"" for begin in range(0, len(archive), CHUNK_BYTES)]
    assert b"".join(pieces) == archive
    assert kept.piece(code.digest, 5) == archive[5:CHUNK_BYTES]
    assert kept.piece(code.digest, len(archive) + CHUNK_BYTES) is None
    now[0] = 1100.0
    assert (kept.unused(50.0), kept.unused(150.0)) == ({code.digest}, set())
    assert kept.use(code.digest)
    kept.remove([code.digest], 50.0)  # it was used meanwhile
    assert kept.kept(code.digest) is not None
    now[0] = 1200.0
    kept.remove([code.digest], 50.0)
    assert (kept.kept(code.digest), kept.piece(code.digest, 0), kept.use(code.digest)) == (None, None, False)
    assert kept.sent_bytes("a") == 0
    file = tmp_path / "code.db"
    assert not file.exists() or file.stat().st_mode & 0o777 == 0o600


async def test_code_is_removed_when_no_task_names_it_that_is_not_deleted(
    settings: Settings, bus: Bus, journal: Journal, code: Code, archive: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Gateway] = []

    def make(*given: Any) -> Gateway:
        made.append(Gateway(*given))
        return made[0]

    monkeypatch.setattr(main, "Gateway", make)
    async with serving(settings, bus, journal) as api:
        kept = made[0].code
        await submit(api, code, archive)
        later = [0.0]
        kept.store._clock = lambda: 2e9 + later[0]
        await kept.remove_unnamed()
        assert kept.store.kept(code.digest) is not None  # a task names it
        end = {"task": "gpt", "generation": 1, "step": 0, "reason": "broken"}
        await api.append(TaskFailed, **end)
        await api.projected((await api.append(TaskDeleted, task="gpt", actor="uid/0")).position)
        kept.store.use(code.digest)
        await kept.remove_unnamed()
        assert kept.store.kept(code.digest) is not None  # it was sent of late
        later[0] += KEPT_UNUSED_S + 1.0
        await kept.remove_unnamed()
        assert await asyncio.to_thread(kept.store.kept, code.digest) is None
        refused(await api.http.post("/v1/tasks/gpt/resume"), 422, "invalid-input")
        # What is submitted long after it was sent is kept until the log has the task.
        await send(api, archive, code.digest)
        later[0] += KEPT_UNUSED_S + 1.0
        assert kept.store.unused(KEPT_UNUSED_S) == {code.digest}
        assert (await api.http.post("/v1/tasks", json=shipped(code, "late"))).status_code == 201
        assert kept.store.unused(KEPT_UNUSED_S) == set()
