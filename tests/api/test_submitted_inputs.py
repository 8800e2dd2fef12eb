"""Files that a submission names are checked by the nodes, each on its own machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from services.agent.files import task_inputs
from services.api.http.problems import MOST_ECHOED
from services.api.submission import submitted_inputs
from shared.bus.connection import Bus
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected
from shared.messages.node_files import FILES
from shared.model import utc_now
from tests.api.kit import Server
from tests.api.node_machines import NodeMachines
from tests.api.test_tasks import refused

SHAPE = {"layers": 2, "hidden": 32, "heads": 2, "sequence_length": 16}


@pytest.fixture
async def node(api: Server, machines: NodeMachines) -> None:
    """A node that is ready."""
    await machines.start("n0")
    await api.join("n0")


def submissions(api: Server) -> list[str]:
    return [r.event.task for r in api.journal.log.read() if r.event.type == "task.submitted"]


def written(folder: Path, **files: bytes) -> Path:
    """Write files whose names have a dot for the underscore; return the folder."""
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return folder


@pytest.mark.usefixtures("node")
async def test_a_vocabulary_too_small_for_a_text_is_refused(api: Server, tmp_path: Path) -> None:
    spec = api.spec(model={**SHAPE, "vocabulary": 256})
    problem = refused(await api.http.post("/v1/tasks", json=spec), 422, "invalid-input")
    (error,) = problem["errors"]
    assert (error["field"], error["value"]) == ("model.vocabulary", 256)
    assert "at least 257" in error["problem"]
    assert submissions(api) == []
    # An indexed dataset may have any tokens, and a script may read the text as it likes.
    written(tmp_path, set_bin=b"", set_idx=b"MMIDIDX\x00\x00", loop_py=b"print()")
    for name, changes in (("a", {"data": str(tmp_path / "set")}), ("b", {"script": str(tmp_path / "loop.py")})):
        accepted = await api.http.post("/v1/tasks", json={**spec, "name": name, **changes})
        assert accepted.status_code == 201, accepted.json()


@pytest.mark.parametrize(
    ("files", "changes", "field", "problem"),
    [
        ({"a_txt": b" \n\n \t\n"}, {"data": "a.txt"}, "data", "nothing but white space"),
        ({"a_txt": b""}, {"data": "a.txt"}, "data", "is empty"),
        ({"a_txt": b""}, {"data": "a.txt", "script": "/dev/null"}, "data", "is empty"),
        ({}, {"data": "a.txt"}, "data", "there is no such file, nor a.txt.bin with a.txt.idx, on n0; allowed:"),
        ({}, {"data": "/dev/null"}, "data", "there is no such file"),
        ({}, {"data": "/"}, "data", "cannot be read"),
        ({}, {"data": "x" * 300}, "data", "cannot be read (File name too long) on n0"),
        ({"a_bin": b"x", "a_idx": b"something else"}, {"data": "a"}, "data", "a.idx is no index"),
        ({"a_bin": b"x", "a_idx": b""}, {"data": "a.bin"}, "data", "a.idx is no index"),
        ({}, {"script": "a.py"}, "script", "there is no such file on n0"),
        ({"a_py": b"def f(:\n"}, {"script": "a.py"}, "script", "not a Python file (SyntaxError: "),
        ({"a_py": b"root:x:hunter2:/root\n"}, {"script": "a.py"}, "script", "not a Python file (SyntaxError: "),
        ({"a_py": b"x = '\0'\n"}, {"script": "a.py"}, "script", "not a Python file ("),
    ],
)
@pytest.mark.usefixtures("node")
async def test_files_that_no_rank_could_use_are_refused(
    api: Server, tmp_path: Path, files: dict[str, bytes], changes: dict[str, str], field: str, problem: str
) -> None:
    folder = written(tmp_path, **files)
    if changes.get("script") == "/dev/null":
        written(tmp_path, a_py=b"")
        changes = {**changes, "script": "a.py"}
    spec = api.spec(**{name: str(folder / path) for name, path in changes.items()})
    answer = refused(await api.http.post("/v1/tasks", json=spec), 422, "invalid-input")
    (error,) = answer["errors"]
    assert error["field"] == field
    assert spec[field].startswith(error["value"].removesuffix("..."))
    assert len(error["value"]) >= min(len(spec[field]), MOST_ECHOED)
    assert problem in error["problem"]
    assert "hunter2" not in str(answer), "it may be any file"
    assert submissions(api) == []


@pytest.mark.usefixtures("node")
async def test_what_only_a_run_can_show_is_left_to_the_ranks(
    api: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_inputs, "BLANK_BYTES", 1 << 20)
    long_script = b"#" * (task_inputs.MAX_SCRIPT_BYTES + 1) + b"\ndef f(:\n"
    deep_script = b"x = " + b"(" * 5_000 + b")" * 5_000
    written(tmp_path, long_py=long_script, deep_py=deep_script, blank_txt=b" " * (2 << 20), same_py=b"print()")
    given = {"long": "long.py", "same": "same.py"}
    for name, path in given.items():
        answer = await api.http.post("/v1/tasks", json=api.spec(name, script=str(tmp_path / path)))
        assert answer.status_code == 201, answer.text
    assert (await api.http.post("/v1/tasks", json=api.spec("c", data=str(tmp_path / "blank.txt")))).status_code == 201
    await api.http.post("/v1/tasks", json=api.spec("deep", script=str(tmp_path / "deep.py")))  # ends no process
    assert (await api.http.post("/v1/tasks", json=api.spec("d"))).status_code == 201


async def test_the_nodes_that_lack_a_file_are_named(
    api: Server, machines: NodeMachines, bus: Bus, tmp_path: Path
) -> None:
    """Here all nodes see the same files, so two answer as if they were other machines."""
    missing = b'{"problems": [{"field": "script", "problem": "there is no such file"}]}\n'

    async def lacks_the_script(_: str, __: bytes) -> bytes:
        return missing

    async def cannot_be_read(_: str, __: bytes) -> bytes:
        return b"[" * 1000

    await machines.start("n0")
    for node, answers in {"n1": lacks_the_script, "n2": lacks_the_script, "n3": cannot_be_read}.items():
        await bus.answer(FILES.at(node), answers)
    await api.join("n0", "n1", "n2", "n3", "n4")  # n4 does not listen
    script = tmp_path / "train.py"
    script.write_text("print()\n")
    answer = refused(await api.http.post("/v1/tasks", json=api.spec(script=str(script))), 422, "invalid-input")
    assert [(e["field"], e["value"], e["problem"]) for e in answer["errors"]] == [
        ("script", str(script), "there is no such file on n1, n2")
    ]
    assert submissions(api) == []
    # A node that is not ready has no say.
    for node in ("n1", "n2"):
        recorded = await api.append(
            ErrorDetected, incident=node, kind=ErrorKind.NODE_LOST, severity=Severity.SEV1, node=node,
            method=Method.NODE_HEALTH, detected_at=utc_now(),
        )  # fmt: skip
    await api.projected(recorded.position)
    assert (await api.http.post("/v1/tasks", json=api.spec(script=str(script)))).status_code == 201


async def test_without_an_answer_a_submission_is_accepted(
    api: Server, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a node; with one of a version without this question; with one that never answers."""
    monkeypatch.setattr(submitted_inputs, "CHECK_TIMEOUT_S", 0.2)

    async def submit(name: str) -> httpx.Response:
        return await api.http.post("/v1/tasks", json=api.spec(name, data="/no/such/corpus.txt"))

    assert (await submit("a")).status_code == 201
    await api.join("n0")
    assert (await submit("b")).status_code == 201

    async def silent(_: str, __: bytes) -> None:
        return

    await bus.listen(FILES.at("n0"), silent)
    assert (await submit("c")).status_code == 201


@pytest.mark.usefixtures("node")
async def test_a_repeated_submission_is_not_checked_again(api: Server, tmp_path: Path) -> None:
    """The task of the first one is the answer, whatever became of the files."""
    data = tmp_path / "text.txt"
    data.write_text("some text")
    arguments: dict[str, Any] = {"json": api.spec(data=str(data)), "headers": {"Idempotency-Key": "k"}}
    assert (await api.http.post("/v1/tasks", **arguments)).status_code == 201
    data.unlink()
    assert (await api.http.post("/v1/tasks", **arguments)).status_code == 200
