"""Rows of the live page: long names, small screens, links, times, and the keyboard's focus (`make test-page`)."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from shared.events.plans import Response, Trigger
from shared.events.union import PlanDecided, TaskSubmitted
from tests.api.kit import Server, spec
from tests.page.kit import Browser, browsing
from tests.page.test_troubles import fail, lose

pytestmark = pytest.mark.page

LONG = "long-" + "n" * 56
WIDTHS = [1280, 1100, 1060, 900, 390, 360]


async def focused(browser: Browser) -> str:
    """Return the label or the text of what has the keyboard's focus."""
    return str(
        await browser.page.evaluate(
            "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent.slice(0, 200)"
        )
    )


@pytest.mark.parametrize("width", WIDTHS)
async def test_every_control_is_in_view_without_scrolling_sideways(cluster: Server, width: int) -> None:
    await cluster.append(TaskSubmitted, task=LONG, spec=spec(LONG, steps=10_000_000, weight=1234.5678))
    await fail(cluster, f"ended-{'n' * 54}", "x" * 200)
    async with browsing(cluster, viewport={"width": width, "height": 800}) as browser:
        await browser.open()
        await browser.shows("#task-rows", LONG)
        await browser.shows("#incident-rows", "process-exit")
        await browser.shows("#cost-totals", "EUR")
        controls: list[Any] = [
            browser.page.get_by_role("button", name=f"Stop task {LONG}"),
            browser.page.get_by_role("button", name="Acknowledge incident i1"),
            browser.page.get_by_role("link", name="post-mortem of i1"),
        ]
        for control in controls:
            box = await control.bounding_box()
            assert 0 <= box["x"] <= box["x"] + box["width"] <= width
        for found in await browser.page.locator(".scroll").all():
            assert await found.evaluate("(one) => one.scrollWidth <= one.clientWidth")


async def test_the_keyboard_stays_where_it_was_after_an_action(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.open_node("n1")
        for button, message, then in [
            ("Drain node n1", "Node n1 is being drained.", "Return node n1"),
            ("Acknowledge incident i1", "Incident i1 is acknowledged.", "Add a note to incident i1"),
        ]:
            await browser.page.get_by_role("button", name=button).focus()
            await browser.page.keyboard.press("Enter")
            await browser.page.locator("#confirm-yes").focus()
            await browser.page.keyboard.press("Enter")
            await browser.shows("#message", message)
            await browser.page.get_by_role("button", name=button).wait_for(state="detached")
            await browser.page.get_by_role("button", name=then).wait_for()
            assert await focused(browser) == then
        browser.check()


async def test_the_keyboard_stays_in_a_row_whose_control_has_gone(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.open_node("n1")
        await browser.page.get_by_role("button", name="Drain node n1").focus()
        await lose(cluster, "n1", "i2")
        await browser.page.get_by_role("button", name="Drain node n1").wait_for(state="detached")
        assert await focused(browser) == "Node n1"


async def test_what_became_of_an_action_is_in_view_for_a_while(cluster: Server) -> None:
    async with browsing(cluster, viewport={"width": 1000, "height": 400}) as browser:
        await browser.page.clock.install()
        await browser.open()
        for _ in range(2):
            await browser.page.get_by_role("button", name="Add a note to incident i1").click()
            assert await browser.page.locator("#message").inner_text() == ""  # that of the action before
            await browser.page.get_by_label("Note, for everybody").fill("the switch of rack 4")
            await browser.page.locator("#confirm-yes").click()
            await browser.shows("#message", "The note was added to incident i1.")
            box = await browser.page.locator("#message").bounding_box()
            assert 0 <= box["y"] <= box["y"] + box["height"] <= 400
        await browser.page.clock.run_for(30_000)
        assert await browser.page.locator("#message").inner_text() == ""


async def test_incidents_plans_and_tasks_lead_to_one_another(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#plan-list", "restart")
        await browser.page.locator("#incident-i1").get_by_role("link", name="p1").click()
        await browser.shows("#plan-p1[open]", "restart (error)")
        assert await browser.page.evaluate("document.activeElement.parentElement.id") == "plan-p1"
        await browser.page.locator("#plan-p1").get_by_role("link", name="i1").click()
        assert await browser.page.evaluate("document.activeElement.id") == "incident-i1"
        assert browser.page.url.endswith("#incident-i1")
        await browser.page.locator("#plan-p1 summary").focus()
        await browser.page.locator("#task-rows").get_by_role("link", name="i1").click()
        assert await browser.page.evaluate("document.activeElement.id") == "incident-i1"
        browser.check()


async def test_the_address_of_an_incident_leads_to_its_row(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.page.goto(f"{cluster.url}/#incident-i1")
        await browser.page.wait_for_function("() => document.activeElement.id === 'incident-i1'")


async def test_a_link_to_what_the_page_does_not_show_says_where_it_is(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#plan-list", "p1")
        fields = {"trigger": Trigger.NODE_JOINED, "cause": "c", "response": Response.NONE, "changes": []}
        for number in range(25):
            await cluster.append(PlanDecided, plan=f"q{number}", **fields)
        await browser.shows("#more-plans", "Only the newest 20 plans are shown")
        await browser.page.locator("#incident-i1").get_by_role("link", name="p1").click()
        await browser.shows("#message", "unicron plan show p1")


async def test_an_id_can_be_copied(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await browser.open()
        await browser.page.get_by_role("button", name="Copy the id i1").click()
        await browser.shows("#message", "Copied: i1")
        assert await browser.page.evaluate("navigator.clipboard.readText()") == "i1"


async def test_an_incident_says_what_happened_how_long_after_the_fault(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        row = browser.page.locator("#incident-i1")
        await row.wait_for()
        assert (await row.locator("td[data-label=answer]").inner_text()).split() == ["restart", "plan", "p1"]
        times = await row.locator("td[data-label='after the fault']").inner_text()
        assert times.splitlines() == ["detected 500 ms", "training again 3.0 s", "planned strength 8.0 s"]


async def test_times_are_those_of_post_mortems_wherever_the_browser_is(cluster: Server) -> None:
    incident = (await cluster.http.get("/v1/incidents/i1")).json()
    shown = f"{datetime.fromisoformat(incident['occurred_at']):%Y-%m-%d %H:%M:%S}"
    assert shown in (await cluster.http.get("/v1/incidents/i1/postmortem", params={"format": "html"})).text
    async with browsing(cluster, timezone_id="America/New_York", locale="en-US") as browser:
        await browser.open()
        await browser.shows("#incident-rows time", shown)
        await browser.shows("#as-of", "UTC")
        await browser.shows("footer", "Times are in UTC")
