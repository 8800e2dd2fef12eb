"""``since`` and ``until`` of the lists."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from shared.events.plans import TaskChange
from tests.api.kit import Server, Story, client_of, offline_gateway, stage


@pytest.fixture
async def client(story: Story, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway over tasks, incidents and plans of seconds 40 to 46; one incident was detected late."""
    story.running("a")
    for number in range(7):
        story.at(40 + number).submit(f"t{number}")
        story.error(f"i{number}", 39 + number, task="a", generation=1)
        change = TaskChange(task="a", reason="again", action="move", from_generation=1, target=stage(2, ["n0/0"]))
        story.plan(f"p{number}", change, incident=f"i{number}")
    story.at(60).error("late", 40, task="a", detected_at=story.time(43.5))
    with offline_gateway(tmp_path, story.records) as gateway:
        async with client_of(gateway) as made:
            yield made


async def listed(client: httpx.AsyncClient, story: Story, path: str, **params: str | int) -> list[str]:
    times = {key: story.time(float(value)).isoformat() for key, value in params.items() if key in ("since", "until")}
    found: list[str] = []
    cursor: str | None = "0"
    while cursor is not None:
        answer = await client.get(f"/v1/{path}", params={**params, **times, "cursor": cursor})
        assert answer.status_code == 200, answer.text
        found += [item["name" if path == "tasks" else "id"] for item in answer.json()["items"]]
        cursor = answer.json()["next_cursor"]
    return found


@pytest.mark.parametrize(("limit", "order"), [(1, "oldest"), (3, "newest"), (100, "newest")])
async def test_a_list_has_what_is_of_the_time(client: httpx.AsyncClient, story: Story, limit: int, order: str) -> None:
    for path, letter in (("tasks", "t"), ("incidents", "i"), ("plans", "p")):
        late = ["late"] if path == "incidents" else []
        for window, numbers in (
            ({"since": 42, "until": 45}, [2, 3, 4]),
            ({"since": 43}, [3, 4, 5, 6]),
            ({"since": 43.2}, [4, 5, 6]),
        ):
            wanted = [f"{letter}{number}" for number in numbers] + late
            found = await listed(client, story, path, limit=limit, order=order, **window)
            assert found == (wanted if order == "oldest" else wanted[::-1])
        assert await listed(client, story, path, since=100) == []
        assert await listed(client, story, path, since=45, until=45) == []


async def test_times_go_with_the_other_filters(client: httpx.AsyncClient, story: Story) -> None:
    assert await listed(client, story, "plans", task="a", since=44, limit=1) == ["p4", "p5", "p6"]
    assert await listed(client, story, "incidents", task="a", state="open", since=46, limit=1) == ["i6"]
    assert await listed(client, story, "tasks", state="pending", until=41, since=40) == ["t0"]


@pytest.mark.parametrize("path", ["tasks", "incidents", "plans", "events"])
async def test_times_need_a_zone_and_an_order(client: httpx.AsyncClient, path: str) -> None:
    wrong = {"since": "2025-03-01T12:00:00Z", "until": "2025-03-01T11:00:00Z"}
    for params, field in ((wrong, "until"), ({"until": "2025-03-01T12:00:00"}, "until"), ({"since": "noon"}, "since")):
        answer = await client.get(f"/v1/{path}", params=params)
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


async def test_events_end_before_a_time(api: Server) -> None:
    for name in ("a", "b", "c"):
        await api.http.post("/v1/tasks", json=api.spec(name))
    items = (await api.http.get("/v1/events")).json()["items"]
    times = {"since": items[1]["recorded_at"], "until": items[2]["recorded_at"]}
    found = (await api.http.get("/v1/events", params=times)).json()
    assert ([item["position"] for item in found["items"]], found["next_cursor"]) == ([2], None)
    paged = (await api.http.get("/v1/events", params={"until": times["until"], "limit": 1})).json()
    assert paged["next_cursor"] == "1"
    following = await api.http.get("/v1/events", params={"until": times["until"], "follow": True})
    assert (following.status_code, following.json()["errors"][0]["field"]) == (422, "until")
