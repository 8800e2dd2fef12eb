"""``/v1/tasks/{name}/metrics``: what ranks have written on the nodes, kept when the nodes are gone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from services.api.store.projection_store import database_url
from services.api.task_metrics import collector, metric_store, series
from shared.bus.connection import Bus
from shared.events.union import TaskStopped, TaskSubmitted
from shared.log.journal import Journal
from shared.settings.model import Settings
from tests.api.kit import Server, Story, serving
from tests.api.node_machines import NodeMachines
from tests.cli.test_client import ask
from tests.condition import until

TASK = "gpt"


@pytest.fixture(autouse=True)
def always_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the nodes at each request, however busy the machine is."""
    monkeypatch.setattr(collector, "FRESH_S", 0.0)
    monkeypatch.setattr(collector, "REST", 0)
    monkeypatch.setattr(collector, "PATIENCE_S", 60.0)


@pytest.fixture
def story(settings: Settings) -> None:
    """A task that has trained on workers n0/0, n0/1, n1/0 and n1/1, in generations 1 to 3."""
    story = Story(settings.run_dir / "log.db")
    story.running().process_exit().process_restored()
    story.log.close()


@pytest.fixture
async def healed(story: None, settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[Server]:
    async with serving(settings, bus, journal) as server:
        yield server


def log(run_dir: Path, generation: int, worker: str, rank: int, steps: Iterable[int], **values: float) -> Path:
    """Write what a rank logs."""
    path = run_dir / "tasks" / TASK / f"generation-{generation}" / "metrics" / f"{worker.replace('/', '-')}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "rank": rank, "values": values}) + "\n")
    return path


async def metrics(server: Server, *names: str, **params: Any) -> dict[str, Any]:
    response = await server.http.get(f"/v1/tasks/{TASK}/metrics", params={"metric": [*names], **params})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def shown(found: dict[str, Any]) -> dict[str, dict[int, float]]:
    return {one["name"]: dict(zip(one["steps"], one["values"], strict=True)) for one in found["series"]}


async def test_values_of_several_ranks_and_generations_are_merged(healed: Server, machines: NodeMachines) -> None:
    await machines.start("n0", "n1")
    n0, n1 = machines.run_dir("n0"), machines.run_dir("n1")
    log(n1, 1, "n1/0", 2, range(1, 9), loss=3.0, of_last_stage=1.0)
    log(n0, 1, "n0/0", 0, range(1, 9), loss=1.0)
    # A fault: the task goes on behind step 6.
    open_file = log(n0, 3, "n0/1", 0, (7,), loss=2.0)
    found = await metrics(healed, "loss", "of_last_stage", "unknown")
    assert found["names"] == ["loss", "of_last_stage"]
    assert shown(found)["loss"] == dict.fromkeys(range(1, 7), 1.0) | {7: 2.0}
    assert (found["attempt"], found["left_out"], found["silent"]) == (1, 0, [])
    assert (await metrics(healed))["series"] == []

    with open_file.open("a") as file:
        file.write('{"step": 8, "rank": 0, "val')
        file.flush()
        assert 8 not in shown(await metrics(healed, "loss"))["loss"]
        file.write('ues": {"loss": NaN}}\nno line of ours\n')
    assert shown(await metrics(healed, "loss"))["loss"][8] is None
    few = await ask(healed, lambda client: client.metrics(TASK, "loss", attempt=1, points=3))
    assert len(few.series[0].steps) <= 3
    assert few.series[0].steps[-1] == 8
    assert (await ask(healed, lambda client: client.metrics(TASK))).names == ["loss", "of_last_stage"]


@pytest.mark.usefixtures("story")
async def test_what_was_read_stays_when_the_api_and_the_nodes_have_ended(
    settings: Settings, bus: Bus, journal: Journal, machines: NodeMachines
) -> None:
    await machines.start("n0", "n1")
    log(machines.run_dir("n1"), 3, "n1/1", 0, (1, 2), loss=1.0)
    async with serving(settings, bus, journal) as server:
        first = await metrics(server, "loss")
    assert shown(first) == {"loss": {1: 1.0, 2: 1.0}}
    log(machines.run_dir("n1"), 3, "n1/1", 0, (3,), loss=1.0)
    machines.away.add("n1")
    async with serving(settings, bus, journal) as server:
        assert await metrics(server, "loss") == first | {"silent": ["n1"]}
        machines.away.clear()
        assert shown(await metrics(server, "loss"))["loss"] == {1: 1.0, 2: 1.0, 3: 1.0}


@pytest.mark.usefixtures("story")
async def test_what_a_running_task_logs_is_read_though_nobody_asks(
    settings: Settings, bus: Bus, journal: Journal, machines: NodeMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "COLLECT_S", 0.05)
    await machines.start("n0", "n1")
    store = metric_store.MetricStore(database_url(settings, "metrics"))
    async with serving(settings, bus, journal):
        log(machines.run_dir("n0"), 3, "n0/0", 0, (1,), loss=1.0)
        await until(lambda: store.names(TASK, 1) == ["loss"])
    store.close()


async def test_each_submission_has_its_own_values(healed: Server, machines: NodeMachines) -> None:
    await machines.start("n0", "n1")
    log(machines.run_dir("n0"), 3, "n0/0", 0, (1, 2), loss=1.0)
    await healed.append(TaskStopped, task=TASK, generation=3, step=2, path="")
    spec = healed.spec(TASK)
    recorded = await healed.append(TaskSubmitted, task=TASK, spec=spec, actor="uid/0")
    await healed.projected(recorded.position)
    log(machines.run_dir("n0"), 4, "n0/0", 0, (2,), loss=5.0)
    assert shown(await metrics(healed, "loss")) == {"loss": {2: 5.0}}
    assert shown(await metrics(healed, "loss", attempt=1)) == {"loss": {1: 1.0, 2: 1.0}}
    response = await healed.http.get(f"/v1/tasks/{TASK}/metrics", params={"attempt": 3})
    assert response.status_code == 404
    assert "submitted 2 times" in response.text


async def test_more_than_may_be_kept_is_thinned_out_and_said(
    healed: Server, machines: NodeMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_store, "MOST_BYTES", 8192)
    await machines.start("n0", "n1")
    log(machines.run_dir("n0"), 3, "n0/0", 0, range(2000), loss=1.0)
    log(machines.run_dir("n0"), 3, "n0/1", 1, (0,), **{f"m{number}": 0.0 for number in range(120)})
    found = await metrics(healed, "loss", points=2000)
    (loss,) = found["series"]
    assert len(found["names"]) == series.MOST_NAMES
    assert found["left_out"] == 21
    assert loss["every"] > 1
    assert loss["steps"][-1] == 1999
    assert len(loss["steps"]) < 8192 / series.POINT_BYTES


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_two_apis_that_read_the_same_take_it_once(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    url = f"sqlite:///{tmp_path / 'metrics.db'}" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    first, second = metric_store.MetricStore(url), metric_store.MetricStore(url)

    def lines(step: int, end: int, value: float) -> metric_store.NewLines:
        line = {"step": step, "rank": 0, "values": {"loss": value}}
        return metric_store.NewLines(1, "n0/0", json.dumps(line).encode(), end)

    new = first.known(TASK)
    assert new == second.known(TASK)
    first.take(TASK, new, [lines(1, 50, 0.5)], [])
    second.take(TASK, new, [lines(1, 50, 0.25)], [])  # it has read the same, too late
    before = second.known(TASK)
    assert before.state.offsets == {"1/n0/0": 50}
    first.take(TASK, before, [lines(2, 100, 0.75)], [])
    second.take(TASK, before, [lines(3, 150, 0.75)], [])
    assert first.known(TASK) == second.known(TASK)
    assert second.known(TASK).state.offsets == {"1/n0/0": 100}
    assert list(second.series(TASK, 1, ["loss"])["loss"].steps) == [1, 2]
    assert second.series(TASK, 1, ["loss"])["loss"].values[0] == 0.5
    for store in (first, second):
        store.close()
