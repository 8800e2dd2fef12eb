"""Readers who ask the same at the same time share an answer, and none is older than its request."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from services.api import shared_answers
from services.api.feed import Feed
from services.api.shared_answers import SharedAnswers


class Lists:
    """An application whose answers are made when ``go`` is set, and say what ``state`` was when they were begun."""

    def __init__(self) -> None:
        self.state, self.made = 0, 0
        self.begun: asyncio.Queue[int] = asyncio.Queue()
        self.go = asyncio.Event()
        self.fails = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.made += 1
        state = self.state
        self.begun.put_nowait(self.made)
        await self.go.wait()
        if self.fails:
            raise ValueError("no answer")
        await JSONResponse({"state": state})(scope, receive, send)


@pytest.fixture
def lists() -> Lists:
    return Lists()


class HeldFeed(Feed):
    """A feed without a log that is behind from ``hold`` to ``catches_up``."""

    def __init__(self) -> None:
        self.waits: asyncio.Queue[float] = asyncio.Queue()
        self._in_time = asyncio.Event()
        self.catches_up()

    def hold(self) -> None:
        self._in_time.clear()

    def catches_up(self) -> None:
        self._in_time.set()

    async def in_time(self, *, timeout_s: float) -> None:
        self.waits.put_nowait(timeout_s)
        await self._in_time.wait()


@pytest.fixture
def feed() -> HeldFeed:
    return HeldFeed()


@pytest.fixture
async def http(lists: Lists, feed: HeldFeed, monkeypatch: pytest.MonkeyPatch) -> httpx.AsyncClient:
    monkeypatch.setattr(shared_answers, "PAUSE_S", 0.01)
    return httpx.AsyncClient(transport=httpx.ASGITransport(SharedAnswers(lists, feed)), base_url="http://localhost")


async def asked(lists: Lists, count: int, http: httpx.AsyncClient, path: str) -> list[asyncio.Task[httpx.Response]]:
    """Ask several times while an answer is made; return when all of them wait for the next one."""
    asking = [asyncio.create_task(http.get(path)) for _ in range(count)]
    for _ in range(20):  # until no task has anything left to do but to wait
        await asyncio.sleep(0)
    return asking


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


async def test_an_answer_that_many_wait_for_is_begun_once_the_feed_has_caught_up(
    lists: Lists, http: httpx.AsyncClient, feed: HeldFeed
) -> None:
    feed.hold()
    lists.go.set()
    await http.get("/v1/tasks")  # one reader waits for nobody
    lists.go.clear()
    first = asyncio.create_task(http.get("/v1/tasks"))
    await lists.begun.get()
    await lists.begun.get()
    others = await asked(lists, 2, http, "/v1/tasks")
    lists.go.set()
    await first
    assert await feed.waits.get() == shared_answers.LONGEST_WAIT_S
    assert lists.made == 2
    lists.state = 1
    feed.catches_up()
    assert [answer.json() for answer in await asyncio.gather(*others)] == [{"state": 1}] * 2


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


async def test_questions_that_nobody_asks_are_forgotten(
    lists: Lists, feed: HeldFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_answers, "_MOST", 3)
    lists.go.set()
    middleware = SharedAnswers(lists, feed)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://localhost") as client:
        for number in range(10):
            await client.get(f"/v1/tasks?limit={number}")
    assert len(middleware._questions) <= 3


def test_pauses_of_different_questions_end_at_common_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long each answer took. A question that one reader alone asks has no pause."""
    monkeypatch.setattr(shared_answers, "PAUSE_S", 0.5)
    monkeypatch.setattr(shared_answers, "REST", 9)
    ends_s = []
    for took_s in (0.01, 0.03, 0.06):
        question = shared_answers._Question(shared=True)
        monkeypatch.setattr("services.api.shared_answers.time.monotonic", lambda took_s=took_s: 100.1 + took_s)
        question.rest(100.1)
        ends_s.append(question.pause_until_s)
        alone = shared_answers._Question()
        alone.rest(100.1)
        assert alone.pause_until_s == 0.0
    assert ends_s == [101.0, 101.0, 101.0]


@pytest.mark.parametrize(("pause_s", "end_s"), [(0.5, 101.5), (0.9, 101.5), (1.2, 102.0), (2.5, 102.0), (30.0, 102.0)])
def test_longer_pauses_have_fewer_ends(pause_s: float, end_s: float) -> None:
    assert shared_answers._common(101.1, pause_s) == end_s
