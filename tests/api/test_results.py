"""Results of finished tasks, fetched from the machine that wrote them."""

from __future__ import annotations

import base64
import hashlib
import os
import random
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.api.output import results
from services.api.output.node_files import OwnFiles
from services.api.output.results import RangeNotSatisfiable, ResultFile, read_result, wanted_range
from shared.errors import Corrupt, Unavailable
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, TaskFinished
from shared.messages import task_folders
from shared.messages.node_files import CHUNK_BYTES, DescribeResult, FilesReply
from shared.messages.task_folders import TaskFilesRequest
from shared.model import utc_now
from tests.api.kit import Server
from tests.api.node_machines import NodeMachines
from tests.api.test_tasks import refused

CONTENT = random.Random(1).randbytes(5 * CHUNK_BYTES + 321)
DIGEST = hashlib.sha256(CONTENT).hexdigest()
PATH = "/v1/tasks/gpt/result"


def write_result(run_dir: Path, content: bytes = CONTENT) -> Path:
    path = run_dir / "tasks" / "gpt" / "generation-3" / "result" / "parameters.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
async def finished(api: Server, machines: NodeMachines) -> Path:
    """A task that has finished, with its parameters on node n1; return their path."""
    await machines.start("n0", "n1")
    await api.join("n0", "n1")
    await api.http.post("/v1/tasks", json=api.spec())
    recorded = await api.append(
        TaskFinished, task="gpt", generation=3, step=9, samples_sha256="a", parameters_path="/p", worker="n1/0"
    )
    await api.projected(recorded.position)
    return write_result(machines.run_dir("n1"))


@pytest.mark.usefixtures("finished")
async def test_a_result_comes_whole_with_its_digest(api: Server) -> None:
    response = await api.http.get(PATH)
    assert response.status_code == 200
    assert response.content == CONTENT
    assert response.headers["etag"] == f'"{DIGEST}"'
    assert response.headers["repr-digest"] == f"sha-256=:{base64.b64encode(bytes.fromhex(DIGEST)).decode()}:"
    assert response.headers["content-length"] == str(len(CONTENT))
    assert response.headers["content-disposition"] == 'attachment; filename="gpt.safetensors"'
    assert (await api.http.get("/v1/tasks/gpt")).json()["result"]["node"] == "n1"


@pytest.mark.usefixtures("finished")
async def test_a_download_goes_on_from_an_offset(api: Server) -> None:
    async def part(**headers: str) -> tuple[int, bytes, str]:
        response = await api.http.get(PATH, headers={name.replace("_", "-"): h for name, h in headers.items()})
        return response.status_code, response.content, response.headers.get("content-range", "")

    size = len(CONTENT)
    assert await part(Range="bytes=300000-") == (206, CONTENT[300_000:], f"bytes 300000-{size - 1}/{size}")
    assert await part(Range="bytes=5-9", If_Range=f'"{DIGEST}"') == (206, CONTENT[5:10], f"bytes 5-9/{size}")
    assert await part(Range="bytes=5-9", If_Range='"other"') == (200, CONTENT, "")
    assert await part(Range="bytes=-5") == (200, CONTENT, "")
    assert (await part(Range=f"bytes={size}-"))[0] == 416


async def test_what_has_no_result_is_a_problem(api: Server, finished: Path) -> None:
    refused(await api.http.get("/v1/tasks/none/result"), 404, "not-found")
    await api.http.post("/v1/tasks", json=api.spec("other"))
    assert "it is pending" in refused(await api.http.get("/v1/tasks/other/result"), 404, "not-found")["detail"]
    os.unlink(finished)
    assert "not on n1 any more: /p" in refused(await api.http.get(PATH), 404, "not-found")["detail"]


async def test_a_lost_node_is_named_unless_another_machine_has_the_result(
    api: Server, finished: Path, machines: NodeMachines
) -> None:
    machines.away.add("n1")
    assert "is on n1, which does not answer" in refused(await api.http.get(PATH), 503, "unavailable")["detail"]
    recorded = await api.append(
        ErrorDetected, incident="i", kind=ErrorKind.NODE_LOST, severity=Severity.SEV1, node="n1",
        method=Method.NODE_HEALTH, detected_at=utc_now(),
    )  # fmt: skip
    await api.projected(recorded.position)
    assert "is on n1, which is lost" in refused(await api.http.get(PATH), 503, "unavailable")["detail"]
    shared = write_result(machines.run_dir("n0"))
    assert (await api.http.get(PATH)).content == CONTENT
    shared.unlink()
    write_result(api.data.parent)  # the api's own run directory
    assert (await api.http.get(PATH)).content == CONTENT


async def described(run_dir: Path) -> ResultFile:
    """A result on this machine."""
    source = OwnFiles(run_dir)
    reply, _ = await source.ask(DescribeResult(task="gpt", generation=3))
    return ResultFile(source, "gpt", 3, reply.size_bytes, reply.version, reply.sha256)


async def test_a_file_that_changes_meanwhile_is_never_taken_for_whole(tmp_path: Path) -> None:
    path = write_result(tmp_path)
    reading = read_result(await described(tmp_path), 0, len(CONTENT))
    assert await anext(reading) == CONTENT[:CHUNK_BYTES]
    write_result(tmp_path, CONTENT[::-1])
    os.utime(path, (1, 1))
    with pytest.raises(Corrupt, match="changed while"):
        await collect(reading)


async def test_the_last_chunk_comes_only_if_the_digest_is_right(tmp_path: Path) -> None:
    write_result(tmp_path)
    file = replace(await described(tmp_path), sha256="0" * 64)
    reading = read_result(file, 0, len(CONTENT))
    for index in range(5):
        assert await anext(reading) == CONTENT[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
    with pytest.raises(Corrupt, match="digest"):
        await collect(reading)


async def test_a_lost_reply_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RETRY_PAUSE_S", 0.0)
    write_result(tmp_path)

    class Unreliable(OwnFiles):
        """Loses every second request."""

        asked = 0

        async def ask(self, request: TaskFilesRequest) -> tuple[FilesReply, bytes]:
            self.asked += 1
            if self.asked % 2:
                raise Unavailable("no answer")
            return await super().ask(request)

    file = replace(await described(tmp_path), source=Unreliable(tmp_path))
    monkeypatch.setattr(results, "READ_AHEAD", 1)
    assert await collect(read_result(file, 0, len(CONTENT))) == CONTENT
    monkeypatch.setattr(results, "ATTEMPTS", 1)
    with pytest.raises(Unavailable):
        await collect(read_result(file, 0, len(CONTENT)))


async def collect(reading: AsyncGenerator[bytes]) -> bytes:
    return b"".join([data async for data in reading])


@pytest.mark.usefixtures("finished")
async def test_a_digest_that_takes_several_requests(api: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_folders, "DIGEST_SLICE_S", 1e-9)
    monkeypatch.setattr(task_folders, "_DIGEST_BLOCK_BYTES", 100_000)
    assert (await api.http.get(PATH)).content == CONTENT


@given(st.text(alphabet="bytes=0123456789-, ", max_size=24), st.integers(1, 1000))
def test_a_range_is_inside_the_file_or_refused(header: str, size_bytes: int) -> None:
    try:
        part = wanted_range(header, size_bytes)
    except RangeNotSatisfiable:
        return
    assert part is None or 0 <= part[0] < part[1] <= size_bytes
