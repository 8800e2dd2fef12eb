"""The verbs that submit a task, wait for it, fetch its result and stop it, against a real server."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.events.union import TaskFailed, TaskFinished, TaskStopped, TaskStopRefused, TaskStopRequested
from tests.api.kit import Server, spec_dict
from tests.api.node_machines import NodeMachines
from tests.cli.conftest import NOWHERE, Unicron, call_unicron
from tests.condition import until


def write_spec(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "corpus.txt").write_text("the dog ran")
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec_dict(**changes)))
    return path


async def test_submit_takes_paths_from_the_specifications_folder(api: Server, unicron: Unicron, tmp_path: Path) -> None:
    path = write_spec(tmp_path / "mine", checkpoint={"directory": "checkpoints"})
    outcome = await unicron("submit", str(path), "-o", "json")
    assert (outcome.code, outcome.err) == (0, "")
    task = json.loads(outcome.out)
    assert task["spec"]["data"] == str(tmp_path / "mine" / "corpus.txt")
    assert task["spec"]["checkpoint"]["directory"] == str(tmp_path / "mine" / "checkpoints")
    outcome = await unicron("submit", str(path))
    assert (outcome.code, outcome.out) == (4, "")
    assert "gpt" in outcome.err


async def test_submit_reads_standard_input(api: Server, unicron: Unicron, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(yaml.safe_dump(api.spec())))
    outcome = await unicron("submit", "-")
    assert (outcome.code, outcome.out) == (0, "submitted gpt (pending)\n")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"steps": -1}, "steps"),
        ({"colour": 1}, "colour"),
        ({"batch": {"global": 3, "micro": 2}}, "batch.micro"),
        (
            {"model": {"layers": 2}},
            "model.hidden: is missing; model.heads: is missing; model.sequence_length: is missing",
        ),
        ({"name": "My_Task"}, "name: must be 1 to 63 lower-case letters, digits and hyphens"),
    ],
)
async def test_a_wrong_field_exits_2_and_is_named_without_asking_the_server(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    path = write_spec(tmp_path / "mine", **changes)
    outcome = await call_unicron("submit", str(path), server=NOWHERE)
    assert (outcome.code, outcome.out) == (2, "")
    assert field in outcome.err
    outcome = await call_unicron("submit", str(path), "-o", "json", server=NOWHERE)
    assert (outcome.code, outcome.out) == (2, "")
    assert json.loads(outcome.err)["code"] == "invalid-input"


async def test_data_that_is_not_there_exits_2_and_nothing_is_logged(
    api: Server, unicron: Unicron, machines: NodeMachines, tmp_path: Path
) -> None:
    await machines.start("n0")
    await api.join("n0")
    path = write_spec(tmp_path / "mine", data="no-such.txt")
    outcome = await unicron("submit", str(path), "-o", "json")
    assert outcome.code == 2
    assert json.loads(outcome.err)["errors"][0]["field"] == "data"
    assert [recorded.event.type for recorded in api.journal.log.read()] == ["node.joined"]


async def test_a_result_is_fetched_goes_on_where_it_broke_off_and_is_checked(
    api: Server, unicron: Unicron, machines: NodeMachines, tmp_path: Path
) -> None:
    await machines.start("n0")
    await api.join("n0")
    await api.http.post("/v1/tasks", json=api.spec(data=str(write_spec(tmp_path / "mine"))))
    target = tmp_path / "parameters"
    assert (await unicron("result", "gpt", str(target))).code == 3  # it has not finished
    content = random.Random(1).randbytes(700_000)
    stored = machines.run_dir("n0") / "tasks" / "gpt" / "generation-1" / "result" / "parameters.safetensors"
    stored.parent.mkdir(parents=True)
    stored.write_bytes(content)
    recorded = await api.append(
        TaskFinished, task="gpt", generation=1, step=9, samples_sha256="a", parameters_path="/p", worker="n0/0"
    )
    await api.projected(recorded.position)
    digest = hashlib.sha256(content).hexdigest()
    partial = tmp_path / f".parameters.{digest[:16]}.partial"
    partial.write_bytes(content[:300_000])
    outcome = await unicron("result", "gpt", str(target), "-o", "json")
    assert json.loads(outcome.out) == {"path": str(target), "size_bytes": len(content), "sha256": digest}
    assert target.read_bytes() == content
    assert not partial.exists()
    partial.write_bytes(bytes(300_000))
    target.unlink()
    outcome = await unicron("result", "gpt", str(target))
    assert (outcome.code, target.exists(), partial.exists()) == (6, False, False)
    assert digest in outcome.err
    assert (await unicron("result", "gpt", str(tmp_path / "no" / "folder"))).code == 2
    assert (await unicron("result", "gpt", str(target))).out == f"{target}: {len(content)} bytes, sha256 {digest}\n"


@pytest.mark.parametrize("content", [b"a: [", b"\xff\xfe\x00", b"just text", b""])
async def test_a_file_that_is_no_specification_exits_2(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    for target in (path, tmp_path / "missing.yaml", tmp_path):
        outcome = await call_unicron("submit", str(target), server=NOWHERE)
        assert (outcome.code, outcome.out) == (2, "")
        assert "Traceback" not in outcome.err


@pytest.mark.parametrize("good", [True, False])
async def test_submit_can_wait_for_the_end(api: Server, unicron: Unicron, tmp_path: Path, good: bool) -> None:
    path = write_spec(tmp_path / "mine")
    waiting = asyncio.ensure_future(unicron("submit", str(path), "--wait", "-o", "json"))

    async def submitted() -> bool:
        return api.journal.log.last_position() == 1

    await until(submitted)
    if good:
        await api.append(TaskFinished, task="gpt", generation=1, step=100, samples_sha256="a", parameters_path="/p")
    else:
        await api.append(TaskFailed, task="gpt", generation=1, step=3, reason="it is broken")
    outcome = await waiting
    task = json.loads(outcome.out)
    assert (outcome.code, task["state"]) == ((0, "succeeded") if good else (1, "failed"))


async def test_stop_waits_until_the_task_has_stopped(api: Server, unicron: Unicron) -> None:
    assert (await unicron("stop", "gpt")).code == 3
    await api.http.post("/v1/tasks", json=api.spec())
    outcome = await unicron("stop", "gpt")
    assert (outcome.code, outcome.out) == (0, "gpt: stopping\n")
    await api.http.post("/v1/tasks", json=api.spec("other"))
    waiting = asyncio.ensure_future(unicron("stop", "other", "--wait"))

    async def asked() -> bool:
        event = api.journal.log.read()[-1].event
        return isinstance(event, TaskStopRequested) and event.task == "other"

    await until(asked)
    await api.append(TaskStopped, task="other", generation=1, step=7, path="/c")
    outcome = await waiting
    shown = "other: stopped at step 7, saved in /c: stopped as asked, saved at step 7\n"
    assert (outcome.code, outcome.out) == (0, shown)
    again = await unicron("stop", "other")
    assert (again.code, again.out) == (0, "other: stopped\n"), "what is so already is no error"
    await api.http.post("/v1/tasks", json=api.spec("third"))
    await api.append(TaskFinished, task="third", generation=1, step=100, samples_sha256="a", parameters_path="/p")
    refused = await unicron("stop", "third")
    assert (refused.code, refused.err) == (4, "unicron: task 'third' has ended: succeeded\n")
    resumed = await unicron("resume", "third")
    assert resumed.code == 4
    assert resumed.err.startswith("unicron: task 'third' has succeeded: it has done all its steps")
    for _ in range(2):
        assert (await unicron("delete", "other")).code == 0


async def test_stop_says_what_cannot_be_saved(api: Server, unicron: Unicron) -> None:
    await api.http.post("/v1/tasks", json=api.spec())
    waiting = asyncio.ensure_future(unicron("stop", "gpt", "--wait"))

    async def asked() -> bool:
        return isinstance(api.journal.log.read()[-1].event, TaskStopRequested)

    await until(asked)
    await api.append(TaskStopRefused, task="gpt", generation=1, step=7, plan="", reason="no room")
    outcome = await waiting
    assert outcome.code == 1
    assert outcome.out.startswith("gpt: running: not stopped, since its state cannot be saved: no room; --discard")
    assert (await unicron("stop", "gpt", "--discard")).out == "gpt: stopping\n"
    event = api.journal.log.read()[-1].event
    assert isinstance(event, TaskStopRequested)
    assert event.lose_steps
    assert (await api.http.get("/v1/tasks/gpt")).json()["stop_refused"] is None
    await api.append(TaskStopped, task="gpt", generation=1, step=9, path="")

    async def stopped() -> bool:
        reason = (await api.http.get("/v1/tasks/gpt")).json()["reason"]
        return bool(reason == "stopped as asked, not saved: there is no checkpoint, and 9 steps are lost")

    await until(stopped)


async def test_show_says_why_a_task_restarts_whole_and_what_to_write_instead(
    api: Server, unicron: Unicron, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    whole = {"script": "train.py", "loop": "restart", "workers": {"min": 4, "max": 4}}
    megatron = ["--num-layers", "2", "--fp8-format", "hybrid", "--tp-comm-overlap", "--lr", "1"]
    for name, more in (("plain", {}), ("settings", {"arguments": megatron, "steps": 9})):
        (tmp_path / "spec.yaml").write_text(yaml.safe_dump({"name": name, **whole, **more}))
        outcome = await unicron("submit", str(tmp_path / "spec.yaml"))
        assert outcome.code == 0, outcome.err
    plain, settings = [(await unicron("show", name)).out for name in ("plain", "settings")]
    assert [line.split(maxsplit=1)[1] for line in plain.splitlines() if line.startswith(("step ", "layout "))] == [
        "unknown", "the script's own"
    ]  # fmt: skip
    assert plain.endswith("since its loop is its own: docs/launching.md has what to write instead\n")
    assert "step                   0 of 9\n" in settings
    assert "starts it again from its own checkpoint, for these settings\n" in settings
    assert [line.split()[:2] for line in settings.splitlines()[-2:]] == [
        ["--fp8-format", "restart"], ["--tp-comm-overlap", "speed-off"]
    ]  # fmt: skip
    shown = json.loads((await unicron("show", "plain", "-o", "json")).out)
    assert (shown["steps"], shown["spec"]["workers"], "model" in shown["spec"]) == (None, {"min": 4, "max": 4}, True)
    assert "plain" in (await unicron("ps")).out
