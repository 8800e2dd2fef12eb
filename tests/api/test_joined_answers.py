"""Readers who ask the same at the same time have one answer, and none is older than its request."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from services.api.route_parts.joined_answers import MOST_KEPT, JoinedAnswers


class Lists:
    """An application whose answers are made when ``go`` is set, and say what ``state`` was when they were begun."""

    def __init__(self) -> None:
        self.state, self.made = 0, 0
        self.begun: asyncio.Queue[int] = asyncio.Queue()
        self.go = asyncio.Event()
        self.fails, self.status = False, 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.made += 1
        state = self.state
        self.begun.put_nowait(self.made)
        await self.go.wait()
        if self.fails:
            raise ValueError("no answer")
        await JSONResponse({"state": state}, self.status)(scope, receive, send)


@pytest.fixture
def lists() -> Lists:
    return Lists()


@pytest.fixture
async def http(lists: Lists) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(JoinedAnswers(lists)), base_url="http://localhost")


async def asked(lists: Lists, count: int, http: httpx.AsyncClient, path: str) -> list[asyncio.Task[httpx.Response]]:
    """Ask several times while an answer is made; return when all of them wait for the next one."""
    asking = [asyncio.create_task(http.get(path)) for _ in range(count)]
    for _ in range(20):  # until no task has anything left to do but to wait
        await asyncio.sleep(0)
    return asking


async def test_those_who_ask_at_once_share_an_answer(lists: Lists, http: httpx.AsyncClient) -> None:
    lists.go.set()
    answers = await asyncio.gather(*(http.get("/v1/tasks") for _ in range(20)))
    assert [answer.json() for answer in answers] == [{"state": 0}] * 20
    assert lists.made == 1


async def test_those_who_ask_meanwhile_share_the_next_answer(lists: Lists, http: httpx.AsyncClient) -> None:
    first = asyncio.create_task(http.get("/v1/tasks?limit=5"))
    await lists.begun.get()
    lists.state = 1
    others = await asked(lists, 10, http, "/v1/tasks?limit=5")
    lists.go.set()
    assert (await first).json() == {"state": 0}
    assert [answer.json() for answer in await asyncio.gather(*others)] == [{"state": 1}] * 10
    assert lists.made == 2


async def test_other_questions_do_not_wait(lists: Lists, http: httpx.AsyncClient) -> None:
    paths = ["/v1/tasks", "/v1/tasks?limit=5", "/v1/nodes", "/v1/tasks/one", "/v1/tasks/one"]
    asking = [asyncio.create_task(http.get(path)) for path in paths]
    for _ in paths:
        await lists.begun.get()
    lists.go.set()
    await asyncio.gather(*asking)


async def test_a_request_with_a_condition_gets_an_answer_of_its_own(lists: Lists, http: httpx.AsyncClient) -> None:
    asking = [asyncio.create_task(http.get("/v1/tasks", headers={"If-None-Match": '"x"'})) for _ in range(2)]
    for _ in asking:
        await lists.begun.get()
    lists.go.set()
    await asyncio.gather(*asking)


async def test_one_reader_waits_for_nobody(lists: Lists, http: httpx.AsyncClient) -> None:
    lists.go.set()
    for number in range(1, 4):
        await http.get("/v1/tasks")
        assert lists.made == number


async def test_whoever_goes_away_leaves_the_answer_to_the_others(lists: Lists, http: httpx.AsyncClient) -> None:
    first = asyncio.create_task(http.get("/v1/tasks"))
    await lists.begun.get()
    leaves, stays = await asked(lists, 2, http, "/v1/tasks")
    leaves.cancel()
    lists.go.set()
    await first
    assert (await stays).json() == {"state": 0}


async def test_all_learn_of_a_failure_and_the_next_reader_asks_anew(lists: Lists, http: httpx.AsyncClient) -> None:
    lists.fails = True
    first = asyncio.create_task(http.get("/v1/tasks"))
    await lists.begun.get()
    others = await asked(lists, 2, http, "/v1/tasks")
    lists.go.set()
    for answer in (first, *others):
        with pytest.raises(ValueError, match="no answer"):
            await answer
    lists.fails = False
    assert (await http.get("/v1/tasks")).json() == {"state": 0}


async def test_questions_that_nobody_asks_are_forgotten(lists: Lists) -> None:
    lists.go.set()
    middleware = JoinedAnswers(lists)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://localhost") as client:
        await asyncio.gather(*(client.get(f"/v1/tasks?limit={number % 5}") for number in range(20)))
    assert middleware._reads == {}


async def test_who_takes_an_older_answer_gets_it_with_its_age(lists: Lists, http: httpx.AsyncClient) -> None:
    lists.go.set()
    await http.get("/v1/tasks")
    lists.state = 1
    older = await http.get("/v1/tasks", headers={"Cache-Control": "no-transform, max-age=9"})
    assert (older.json(), older.headers["age"], lists.made) == ({"state": 0}, "1", 1)
    for others in ("", "max-age=0", "no-cache", "s-max-age=9"):
        lists.state += 1
        fresh = await http.get("/v1/tasks", headers={"Cache-Control": others})
        assert (fresh.json(), "age" in fresh.headers) == ({"state": lists.state}, False)


async def test_no_answer_is_taken_that_is_older_than_asked_for(
    lists: Lists, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists.go.set()
    await http.get("/v1/tasks")
    now_s = time.monotonic()
    for passed_s, made in ((0.9, 1), (1.1, 2)):
        monkeypatch.setattr(
            "services.api.route_parts.joined_answers.time.monotonic", lambda passed_s=passed_s: now_s + passed_s
        )
        await http.get("/v1/tasks", headers={"Cache-Control": "max-age=1"})
        assert lists.made == made


async def test_a_problem_is_not_kept(lists: Lists, http: httpx.AsyncClient) -> None:
    lists.go.set()
    lists.status = 503
    assert (await http.get("/v1/tasks")).status_code == 503
    lists.status = 200
    assert (await http.get("/v1/tasks", headers={"Cache-Control": "max-age=9"})).status_code == 200


async def test_few_answers_are_kept(lists: Lists) -> None:
    lists.go.set()
    middleware = JoinedAnswers(lists)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://localhost") as client:
        for number in range(MOST_KEPT + 3):
            await client.get(f"/v1/tasks?limit={number}")
    assert [query for _, query in middleware._kept] == [f"limit={n}".encode() for n in range(3, MOST_KEPT + 3)]
