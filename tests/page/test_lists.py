"""Lists of the live page that have more than it shows, and the incidents of its chart (`make test-page`)."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected
from tests.api.kit import Server
from tests.condition import until
from tests.page.kit import browsing
from tests.page.test_troubles import fail

pytestmark = pytest.mark.page


async def detect(cluster: Server, number: int, ago_s: float) -> None:
    """Have so many incidents of the last minutes in the log."""
    at = datetime.now(UTC) - timedelta(seconds=ago_s)
    events = [
        ErrorDetected(
            event_id=str(uuid.uuid4()),
            incident=str(uuid.uuid4()),
            occurred_at=at,
            detected_at=at,
            kind=ErrorKind.HANG,
            severity=Severity.SEV3,
            method=Method.PROCESS_SUPERVISION,
            task="gpt",
            worker="n0/1",
            node="n0",
        )
        for _ in range(number)
    ]
    recorded = await cluster.journal.append(events)
    await cluster.projected(recorded[-1].position)


async def test_the_chart_has_all_incidents_of_its_time(cluster: Server) -> None:
    await detect(cluster, 30, 120)
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#waf-text", "31 incidents in this time.")
        await browser.shows("#trouble-list", "hang of n0/1, 30 times")
        await browser.shows("#more-incidents", "Only the newest 25 incidents are shown")
        await detect(cluster, 3, 1)
        await browser.shows("#waf-text", " 34 incidents in this time.")
        await browser.page.locator("#waf-window").select_option("60")
        await browser.shows("#waf-text", " 3 incidents in this time.")
        await browser.page.locator("#waf-window").select_option("3600")
        await browser.shows("#waf-text", " 34 incidents in this time.")
        await detect(cluster, 190, 1)
        await browser.shows("#waf-text", "more than 200 incidents in this time.")
        browser.check()


async def test_work_above_the_healthy_line_is_explained(cluster: Server) -> None:
    async def faster(route: Any) -> None:
        answer = await route.fetch()
        history = await answer.json()
        line = history["healthy_flop_per_s"]
        await route.fulfill(
            response=answer, json={**history, "waf_flop_per_s": [1.25 * flop_per_s for flop_per_s in line]}
        )

    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#waf-text", "1 incident in this time.")
        assert "faster" not in await browser.page.locator("#waf-text").inner_text()
        await browser.page.route("**/v1/waf?*", faster)
        await browser.shows("#waf-text", "(125.0 %), as steps are faster than the plans took them to be; 1 incident")
        browser.check()


async def test_the_pointer_names_an_incident_of_the_chart(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#waf-text", "1 incident in this time.")
        box = await browser.page.locator(".u-over").bounding_box()
        for x in range(int(box["width"])):
            await browser.page.mouse.move(box["x"] + box["width"] - x, box["y"] + 20)
            if await browser.page.locator("#waf-chart").get_attribute("title"):
                break
        title = await browser.page.locator("#waf-chart").get_attribute("title")
        assert title is not None
        assert "SEV2: process-exit on n1/1" in title


async def test_lists_say_that_there_is_more(cluster: Server) -> None:
    for number in range(22):
        await fail(cluster, f"broken-{number}", "no such file")
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#trouble-list", "broken-21, broken-20, broken-19 and 19 more failed: no such file")
        await browser.shows(
            "#more-tasks", "Only the newest 20 failed tasks are shown; the command unicron ps lists all."
        )
        assert await browser.page.locator("#task-rows tr").count() == 12
        await browser.page.get_by_role("button", name="Show all 21").click()
        assert await browser.page.locator("#task-rows tr").count() == 21
        await browser.page.get_by_role("button", name="Show fewer").wait_for()
        await browser.drawn_again()
        assert await browser.page.locator("#task-rows tr").count() == 21


async def test_while_many_events_come_others_answers_will_do_and_the_last_one_is_new(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#incident-rows", "process-exit")
        ages: list[str] = []

        def note(request: Any) -> None:
            if "/v1/incidents?" in request.url and "state=open" in request.url:
                ages.append(request.headers.get("cache-control", ""))

        browser.page.on("request", note)
        for _ in range(200):  # of which many come in the time of a long pause, until the page has taken an older answer
            if "max-age=1" in ages:
                break
            await detect(cluster, 3, 0.0)
            await asyncio.sleep(0.1)
        await until(lambda: "max-age=1" in ages and ages[-1] != "max-age=1", limit_s=30.0)
        await browser.shows("#incident-rows", "hang")
        browser.check()
