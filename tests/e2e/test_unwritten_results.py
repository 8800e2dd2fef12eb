"""A task whose steps are all done and whose result cannot be written: it waits, and nothing that is done is lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cli.stack.stack import Stack
from tests.e2e.kit import Client, Pace, Record, check_result, pids, small_task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

BLOCKED_S = 20.0
"""A storage outage. Ranks that gave up after a few tries had failed their task within 4 s."""


def begin(client: Client, name: str, corpus: Path, tmp_path: Path) -> tuple[Record, Pace]:
    """Submit a task that trains until it is let go on; return its specification and what lets it."""
    pace = Pace(tmp_path, 0.05)
    spec = small_task(name, corpus, steps=12, workers={"min": 2, "max": 2}, checkpoint={"every": 8})
    client.submit(pace.of(spec))
    client.until_step(name, 1)
    return spec, pace


def block(stack: Stack, name: str, *folders: str) -> list[Path]:
    """Put files in place of folders of a task's first generation: nobody, not even root, can write below them."""
    generation = stack.run_dir / "tasks" / name / "generation-1"
    generation.mkdir(exist_ok=True)
    for folder in folders:
        if (generation / folder).exists():  # the nodes have made sure that they share it
            (generation / folder).rename(generation / f"{folder}-before")
        (generation / folder).write_text("")
    return [generation / folder for folder in folders]


def until_waits(client: Client, name: str) -> Record:
    """Wait until the task says that it waits for its storage; return it."""

    def waits() -> Record | None:
        task = client.task(name)
        assert task["state"] != "failed", task
        says_so = task["reason"].startswith("waits for its storage: all steps are done")
        return task if says_so and task["step"] == task["steps"] else None  # the step comes with the heartbeats

    record: Record = client.until("the task waits", waits)
    return record


def events(client: Client, name: str, type_: str) -> list[Record]:
    """Return the events of a type that are about a task."""
    return [e["event"] for e in client.items("/v1/events") if e["type"] == type_ and e["event"].get("task") == name]


def test_a_result_that_cannot_be_written_for_a_while(
    client: Client, stack: Stack, corpus: Path, tmp_path: Path
) -> None:
    name = "unwritten"
    spec, pace = begin(client, name, corpus, tmp_path)
    blocked = block(stack, name, "result", "checkpoints")
    before = client.task(name)
    pace.end()
    waiting = until_waits(client, name)
    ends_s = time.monotonic() + BLOCKED_S
    assert (waiting["state"], waiting["step"], pids(waiting)) == ("running", 12, pids(before))
    assert str(blocked[0]) in waiting["reason"]
    assert f'unicron_task_waits_for_storage{{task="{name}"}} 1.0' in client.http.get("/metrics").text
    client.until("the outage is over", lambda: time.monotonic() > ends_s)
    still = until_waits(client, name)
    assert (still["generation"], pids(still)) == (waiting["generation"], pids(before))
    for path in blocked:
        path.unlink()
    client.until_state(name, "succeeded")
    check_result(client, name, spec, tmp_path)
    assert client.incidents(name) == []
    assert events(client, name, "task.failed") == []
    steps = [event["step"] for event in events(client, name, "task.checkpoint-failed")]
    assert steps[-1] == 12


def test_a_task_that_cannot_write_its_result_is_stopped_and_has_only_that_left_to_do(
    client: Client, stack: Stack, corpus: Path, tmp_path: Path
) -> None:
    name = "unwritten-stopped"
    spec, pace = begin(client, name, corpus, tmp_path)
    block(stack, name, "result")
    pace.end()
    until_waits(client, name)
    client.http.post(f"/v1/tasks/{name}/stop").raise_for_status()
    stopped = client.until_state(name, "stopped")
    assert (stopped["step"], stopped["saved_step"]) == (12, 12)
    resumed = client.http.post(f"/v1/tasks/{name}/resume").raise_for_status().json()
    assert resumed["step"] == 12
    client.until_state(name, "succeeded")
    check_result(client, name, spec, tmp_path)
    assert client.incidents(name) == []


def test_its_workers_are_lent_and_it_has_some_back_to_write_only(
    client: Client, stack: Stack, corpus: Path, tmp_path: Path
) -> None:
    """Neither result nor checkpoint can be written: what is done is in the nodes' memory alone, meanwhile."""
    name, other = "unwritten-lent", "borrows"
    pace = Pace(tmp_path, 0.05)
    place = {"every": 8, "memory_every": 4}
    spec = small_task(name, corpus, steps=12, workers={"min": 2, "max": 2}, checkpoint=place)
    env = spec["env"] | {"UNICRON_LEND_AFTER_S": "2"}
    client.submit(pace.of(spec | {"env": env}))
    client.until_step(name, 1)
    beside = tmp_path / "beside"
    beside.mkdir()
    client.submit(Pace(beside, 0.05).of(small_task(other, corpus, steps=100_000, workers={"min": 1, "max": None})))
    client.until_step(other, 1)
    blocked = block(stack, name, "result", "checkpoints")
    pace.end()
    client.until("its workers are lent", lambda: client.task(name)["state"] == "queued")
    waiting = client.until("its copies are kept", lambda: (t := client.task(name))["copies_kept"] and t)
    assert waiting["reason"].startswith("waits for its storage: all steps are done")
    assert (waiting["workers"], waiting["wait"]["until"] is not None) == (0, True)
    assert f'unicron_task_waits_for_storage{{task="{name}"}} 1.0' in client.http.get("/metrics").text
    client.until("the other task has them", lambda: client.task(other)["workers"] == 4)
    for path in blocked:
        path.unlink()  # a node sees it long before the time has come to try again
    client.until_state(name, "succeeded")
    check_result(client, name, spec, tmp_path)
    waits = events(client, name, "task.result-unwritten")
    assert [(wait["ended"], wait["reason"][-30:]) for wait in waits[1:]] == [(True, "can write to its storage again")]
    last = [e for e in events(client, name, "state.moved") if e["phase"] == "restored"][-1]
    assert (last["step"], last["steps_recomputed"]) == (12, 0)
    assert set(last["sources"].values()) <= {"memory", "peer-memory"}
    client.until("its copies are deleted", lambda: not client.task(name)["copies_kept"])
    assert client.incidents(name) == []
    assert client.task(other)["state"] in ("running", "transitioning")
    client.http.post(f"/v1/tasks/{other}/stop", json={"at_once": True}).raise_for_status()
    client.until_state(other, "stopped")


RAISES = """
import os, pathlib, time
import torch, unicron

def build(tensor, pipeline):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)

run = unicron.attach(steps=12, micro_batches=8, build=build, checkpoint_every=4, memory_every=1)
for step in run.steps():
    with step:
        for k in step.micro_batches():
            if step.number == 11 and pathlib.Path(os.environ["FAIL"]).exists():
                raise ValueError("no such sample")
            time.sleep(0.05)  # a copy is stored within a step
            loss = run.model(torch.ones(4) * k).square().sum()
            (loss / 8).backward()
            step.commit(k, float(loss.detach()), [k])
        step.reduce()
        run.optimizer.step()
"""


def fail_in_a_step(client: Client, name: str, tmp_path: Path) -> Path:
    """Have a task fail behind its newest checkpoint; return the file whose end mends it."""
    script, fail = tmp_path / "raises.py", tmp_path / "fail"
    script.write_text(RAISES)
    fail.touch()
    place = {"every": 4, "memory_every": 1}
    spec = small_task(name, script, steps=12, workers={"min": 4, "max": 4}, checkpoint=place, max_restarts=0)
    env = spec["env"] | {"FAIL": str(fail)}
    client.submit(spec | {"batch": {"global": 8}, "script": str(script), "env": env})
    failed = client.until_state(name, "failed")
    assert 0 < failed["saved_step"] <= 8
    return fail


def test_a_task_that_failed_goes_on_from_its_copies_which_are_newer_than_its_checkpoint(
    client: Client, tmp_path: Path
) -> None:
    name = "failed-in-a-step"
    fail_in_a_step(client, name, tmp_path).unlink()
    client.http.post(f"/v1/tasks/{name}/resume").raise_for_status()
    client.until_state(name, "succeeded")
    resumed = [e for e in events(client, name, "state.moved") if e["phase"] in ("resumed", "restored")]
    assert resumed[-1]["step"] == 11
    assert set(resumed[-1]["sources"].values()) <= {"memory", "peer-memory"}


def test_copies_stay_until_their_task_is_over_also_over_a_restart_of_an_agent(client: Client, tmp_path: Path) -> None:
    name = "failed-and-deleted"
    fail_in_a_step(client, name, tmp_path)

    def kept() -> Record:
        copies: Record = client.task(name)["copies_kept"]
        return copies

    before: Record = client.until("nodes keep its copies", kept)
    assert all(size_bytes > 0 for size_bytes in before.values())
    node = next(iter(before))
    incarnation = client.http.get(f"/v1/nodes/{node}").raise_for_status().json()["incarnation"]
    client.http.post(f"/v1/nodes/{node}/agent/restart").raise_for_status()
    client.until(
        "the node has another agent",
        lambda: client.http.get(f"/v1/nodes/{node}").json()["incarnation"] != incarnation,
    )
    client.until("they are there still", lambda: kept().items() >= before.items())
    client.http.delete(f"/v1/tasks/{name}").raise_for_status()
    client.until("they are deleted", lambda: not kept())
