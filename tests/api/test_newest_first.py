"""Lists with ``order=newest``: the same items as in the order of the log, from the other end, page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.events.plans import TaskChange
from tests.api.kit import Story, client_of, offline_gateway, stage

TASKS = ("a", "b")
PAGES = ("tasks", "incidents", "plans")


@pytest.fixture
async def client(story: Story, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway over two tasks, seven incidents and nine plans."""
    story.running("a")
    story.at(30).submit("b")
    for number in range(7):
        name = TASKS[number % 2]
        story.at(40 + number).error(f"i{number}", 39 + number, task=name, generation=1)
        change = TaskChange(task=name, reason="again", action="move", from_generation=1, target=stage(2, ["n0/0"]))
        story.at(50 + number).plan(f"p{number}", change, incident=f"i{number}")
    with offline_gateway(tmp_path, story.records) as gateway:
        async with client_of(gateway) as made:
            yield made


async def listed(client: httpx.AsyncClient, path: str, **parameters: Any) -> list[str]:
    """Return what identifies the items of all pages of a list."""
    found: list[str] = []
    cursor: str | None = "0"
    while cursor is not None:
        answer = await client.get(f"/v1/{path}", params={**parameters, "cursor": cursor})
        assert answer.status_code == 200
        found += [item["name" if path == "tasks" else "id"] for item in answer.json()["items"]]
        cursor = answer.json()["next_cursor"]
    return found


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_all_items_come_once_from_the_newest_on(client: httpx.AsyncClient, path: str, limit: int) -> None:
    oldest_first = await listed(client, path)
    assert len(oldest_first) > 1
    assert await listed(client, path, order="oldest", limit=limit) == oldest_first
    assert await listed(client, path, order="newest", limit=limit) == oldest_first[::-1]


@pytest.mark.parametrize("path", PAGES[1:])
@pytest.mark.parametrize("task", TASKS)
async def test_the_list_of_one_task_has_that_order_too(client: httpx.AsyncClient, path: str, task: str) -> None:
    oldest_first = await listed(client, path, task=task)
    assert len(oldest_first) > 2
    assert await listed(client, path, task=task, order="newest", limit=2) == oldest_first[::-1]


async def test_several_states_are_one_list(client: httpx.AsyncClient) -> None:
    states = {"state": ["outstanding", "done", "superseded", "failed"]}
    assert await listed(client, "plans", **states, order="newest", limit=2) == (await listed(client, "plans"))[::-1]


async def test_another_order_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/plans", params={"order": "best"})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "order")
