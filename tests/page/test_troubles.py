"""What needs somebody stands out on the live page, and comes first (`make test-page`)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shared.events.plans import Response, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, NodeJoined, PlanDecided, TaskFailed, TaskSubmitted, WorkerSlowed
from shared.messages.health import Health
from tests.api.kit import Server, spec
from tests.page.kit import SCHEMES, browsing, event_types

pytestmark = pytest.mark.page

REASON = "\n".join(["the script has failed 4 times at step 7", *(f"  line {number}" for number in range(24))])


async def fail(cluster: Server, task: str, reason: str = REASON) -> None:
    """Have a task that was submitted end as failed."""
    await cluster.append(TaskSubmitted, task=task, spec=spec(task))
    await cluster.append(TaskFailed, task=task, generation=0, step=7, reason=reason)


async def lose(cluster: Server, node: str, incident: str, detected_at: datetime | None = None) -> None:
    await cluster.append(
        ErrorDetected,
        incident=incident,
        kind=ErrorKind.NODE_LOST,
        severity=Severity.SEV1,
        method=Method.NODE_HEALTH,
        detected_at=detected_at or datetime.now(UTC),
        node=node,
    )


async def wait_for_workers(cluster: Server, task: str) -> None:
    """Have a task submitted and queued."""
    await cluster.append(TaskSubmitted, task=task, spec=spec(task))
    await cluster.append(
        PlanDecided,
        plan="p9",
        trigger=Trigger.TASK_SUBMITTED,
        cause="cause",
        response=Response.NONE,
        changes=[],
        queued={task: "needs 9 workers"},
    )


async def test_each_cause_has_a_row_the_gravest_first_and_the_title_says_it(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#summary", "● no trouble")
        await browser.shows("#parts", "● control plane works")
        assert await browser.page.title() == "Unicron"
        await fail(cluster, "broken")
        await browser.shows("#summary.trouble", "▲ 1 cause of trouble")
        await lose(cluster, "n1", "i2")
        await wait_for_workers(cluster, "patient")
        slow = {"node": "n0", "worker": "n0/0", "rank": 0, "slowdown": 2.5}
        await cluster.append(WorkerSlowed, task="gpt", generation=3, step=9, **slow)
        await browser.shows("#summary", "▲ 4 causes of trouble")
        assert await browser.page.locator("#trouble-list h3").all_inner_texts() == [
            "▲ SEV1: node-lost of n1", f"▲ broken failed: {REASON.splitlines()[0]}",
            "△ n0/0 of gpt is 2.50 times as slow as its peers", "△ patient waits for workers: needs 9 workers",
        ]  # fmt: skip
        assert await browser.page.title() == "▲ SEV1: node-lost of n1 and 3 more - Unicron"
        browser.check()


async def test_a_part_of_the_control_plane_that_is_away_comes_first(cluster: Server, parts: dict[str, Health]) -> None:
    await lose(cluster, "n1", "i2")
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#trouble-list", "n1 is lost: start the machine")
        parts["planner"] = Health(ready=False, detail="waiting for the log", handled=0)
        await browser.shows("#parts.trouble", "▲ control plane: planner away, planner ")
        await browser.shows("#parts", "events behind")
        await browser.shows("#connection", "△ up to date")
        await browser.shows("#trouble-list", "Nothing heals it while the control plane is away.")
        first = await browser.page.locator("#trouble-list li").first.inner_text()
        assert "The control plane does not work (planner: waiting for the log)" in first
        assert "Start planner again (unicron control, or its unit)" in first
        browser.check()


SCREENS = [{"width": 390, "height": 844}, {"width": 1440, "height": 900}]


@pytest.mark.parametrize("screen", SCREENS, ids=["phone", "desk"])
async def test_cause_action_and_cost_of_all_that_is_wrong_are_on_the_first_screen(
    cluster: Server, parts: dict[str, Health], screen: dict[str, int]
) -> None:
    parts["planner"] = Health(ready=False, detail="waiting for the log", handled=0)
    await cluster.append(
        ErrorDetected,
        incident="i2",
        kind=ErrorKind.PROCESS_EXIT,
        severity=Severity.SEV2,
        method=Method.PROCESS_SUPERVISION,
        occurred_at=datetime.now(UTC) - timedelta(seconds=100),
        detected_at=datetime.now(UTC),
        task="gpt",
        node="n0",
        worker="n0/1",
        rank=1,
        generation=3,
        step=99,
    )
    names = [f"m{number}" for number in range(8)]
    for name in names:
        await cluster.append(
            NodeJoined,
            node=name,
            incarnation=name,
            agent_pid=1,
            domain="rack-4",
            workers=[f"{name}/{i}" for i in range(8)],
        )
    for name in names:
        await lose(cluster, name, f"lost-{name}")
    await fail(cluster, "broken")
    async with browsing(cluster, viewport=screen) as browser:
        await browser.open("△ up to date")
        await browser.shows("#summary", "▲ 4 causes of trouble")
        await browser.shows("#losing", "losing 245 EUR/h, WAF ")  # 68 workers of 3.60 EUR/h
        rows = browser.page.locator("#trouble-list li")
        texts = [(await row.inner_text()).replace("\xa0", " ") for row in await rows.all()]
        for text, said in zip(
            texts,
            [
                ("control plane does not work", "Start planner again", "cost not known"),
                (
                    "process-exit of n0/1; hits gpt",
                    "longer than usual (median 8.0 s)",
                    "14.40 EUR/h",
                    "nobody is on it",
                ),
                ("8 nodes of rack-4", "m0 is lost: start the machine", "230 EUR/h"),
                ("broken failed: the script has failed 4 times", "unicron resume broken", "0.00 EUR/h"),
            ],
            strict=True,
        ):
            assert all(part in text for part in said), text
        for part in ("h3", ".since", ".todo", ".cost"):
            for found in await rows.locator(part).all():
                box = await found.bounding_box()
                assert 0 <= box["x"] <= box["x"] + box["width"] <= screen["width"]
                assert 0 <= box["y"] <= box["y"] + box["height"] <= screen["height"], await found.inner_text()
        sections = browser.page.locator("main section:visible")
        shown = await sections.evaluate_all("(all) => all.map((one) => one.id)")
        assert shown == ["now", "tasks", "cluster", "waf", "incidents", "plans", "costs"]
        assert await browser.page.evaluate("document.documentElement.scrollWidth") == screen["width"]
        browser.check()


async def test_who_is_on_it_is_said_and_the_keyboard_stays_in_the_row(cluster: Server) -> None:
    await lose(cluster, "n1", "i2")
    async with browsing(cluster) as browser:
        await browser.open()
        row = browser.page.locator("#trouble-list li")
        await browser.shows("#trouble-list .who", "nobody is on it")
        await row.get_by_role("button", name="Acknowledge incident i2").focus()
        await browser.page.keyboard.press("Enter")
        await browser.page.locator("#confirm-yes").click()
        await browser.shows("#trouble-list .who", " is on it")
        await row.get_by_role("button", name="Acknowledge incident i2").wait_for(state="detached")
        await browser.drawn_again()
        label = await browser.page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert label == "Add a note to incident i2"
        link = row.get_by_role("link", name="post-mortem of i2")
        await link.focus()
        await browser.drawn_again()
        assert await link.evaluate("(found) => found === document.activeElement")
        browser.check()


async def test_a_cause_that_is_no_incident_is_acknowledged_in_its_row(cluster: Server) -> None:
    await fail(cluster, "broken")
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#trouble-list .who", "nobody is on it")
        await browser.page.locator("#trouble-list").get_by_role("button", name="Acknowledge cause failed-").click()
        await browser.page.locator("#confirm-yes").click()
        await browser.shows("#message", "The cause is acknowledged.")
        await browser.shows("#trouble-list .who", " is on it")
        assert (await event_types(cluster))[-1] == "trouble.acknowledged"
        browser.check()


async def test_a_task_that_failed_is_resumed_from_its_row(cluster: Server) -> None:
    await cluster.append(TaskFailed, task="gpt", generation=3, step=95, reason="no such file")
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.page.locator("#trouble-list").get_by_role("button", name="Resume task gpt").click()
        await browser.page.locator("#confirm-yes").click()
        await browser.shows("#message", "Task gpt goes on.")
        assert "task.submitted" in (await event_types(cluster))[-3:]
        browser.check()


@pytest.mark.parametrize("options", SCHEMES, ids=["light", "dark", "phone"])
async def test_axe_finds_no_violation_amid_troubles(cluster: Server, options: dict[str, Any]) -> None:
    from axe_playwright_python.async_playwright import Axe

    async with browsing(cluster, **options) as browser:
        await browser.open()
        await fail(cluster, "broken")
        await lose(cluster, "n1", "i2")
        await wait_for_workers(cluster, "patient")
        await browser.shows("#trouble-list", "△ patient waits for workers")
        await browser.shows("#node-map .trouble", "n1")
        await browser.page.locator("#task-rows tr.failed summary").click()
        await browser.page.locator("#trouble-list").get_by_role("button", name="Acknowledge incident i2").click()
        await browser.page.locator("#confirm-yes").click()
        await browser.shows("#message", "Incident i2 is acknowledged.")
        found = await Axe().run(browser.page)
        assert found.violations_count == 0, found.generate_report()
        await browser.page.set_extra_http_headers({"Authorization": "Bearer wrong"})
        await browser.shows("#no-session", "unicron open")
        found = await Axe().run(browser.page)
        assert found.violations_count == 0, found.generate_report()


async def test_a_failed_task_stands_out_with_a_reason_that_can_be_read(cluster: Server) -> None:
    async with browsing(cluster, viewport={"width": 1280, "height": 900}) as browser:
        await browser.open()
        await fail(cluster, "broken")
        row = browser.page.locator("#task-rows tr.failed")
        await row.wait_for()
        state = row.locator(".state")
        assert await state.inner_text() == "▲ failed"
        usual = await browser.page.evaluate("getComputedStyle(document.body).color")
        assert await state.evaluate("(found) => getComputedStyle(found).color") != usual
        assert (await row.bounding_box())["height"] < 120
        assert not await row.get_by_text("line 23").is_visible()
        await row.locator("summary").click()
        await row.get_by_text("line 23").wait_for()
        await browser.drawn_again()
        assert await row.get_by_text("line 23").is_visible()  # it stays open
        browser.check()


async def test_what_needs_somebody_comes_first(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#incident-rows", "process-exit")
        await fail(cluster, "broken")
        await lose(cluster, "n1", "i2", datetime.now(UTC) - timedelta(hours=1))
        await browser.shows("#incident-rows", "node-lost")
        await browser.shows("#node-map .trouble", "n1")
        await browser.shows("#task-rows", "broken")
        assert "broken" in await browser.page.locator("#task-rows tr").first.inner_text()
        assert "node-lost" in await browser.page.locator("#incident-rows tr").first.inner_text()


async def test_a_task_that_does_not_train_has_no_time_left(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await wait_for_workers(cluster, "patient")
        row = browser.page.locator("#task-rows tr.queued")
        await row.wait_for()
        assert await row.locator("td[data-label=left]").inner_text() == "waits"
        assert await browser.page.locator("#task-rows tr.running td[data-label=left]").inner_text() != "waits"


async def test_an_incident_says_which_task_failed_of_it(cluster: Server) -> None:
    await cluster.append(TaskFailed, task="gpt", generation=3, step=95, reason=REASON, incident="i1")
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#incident-i1", "▲\u00a0gpt failed")
        shown = await browser.page.locator("#incident-i1").inner_text()
        assert "detected" in shown
        assert "planned strength" not in shown  # it was not healed: no figure says that it was
        assert "training again" not in shown
        browser.check()


async def test_a_slow_worker_is_listed_with_its_post_mortem_and_stays_when_it_is_over(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        assert await browser.page.locator("#slow").is_hidden()
        about = {"node": "n1", "worker": "n1/1", "task": "gpt", "generation": 3, "rank": 3}
        await cluster.append(WorkerSlowed, slowdown=2.5, **about)
        await browser.shows("#slow-list", "△ n1/1 of gpt is 2.50 times as slow as its peers")
        await cluster.append(WorkerSlowed, slowdown=1.0, **about)
        await browser.shows("#slow-list", "● n1/1 of gpt was 2.50 times as slow as its peers")
        await browser.page.get_by_role("link", name="post-mortem of the slow worker n1/1").click()
        await browser.page.wait_for_url("**/v1/slow-workers/*/postmortem?format=html")
        await browser.shows("h1", "n1/1 of gpt was 2.5 times as slow as its peers")
        browser.check()
