"""The live page in a browser: what is shown, what a user may ask for, and for whom (`make test-page`)."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.bus.connection import Bus
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected
from shared.messages.signals import HEARTBEATS, DeviceReading, DeviceStatus
from shared.service.tokens import Scope
from shared.settings.model import Settings
from tests.api.kit import Server, bearer
from tests.condition import until
from tests.page.kit import PHONE, SCHEMES, browsing, event_types
from tests.versions.kit import heartbeat

pytestmark = pytest.mark.page


REACHED = "[data-reached]"
ACTIONS = "main :is(a, button:not(.cell), select, summary):visible"
"""The map is one stop, in which arrow keys move (test_map.py)."""
FOCUS_IS_SEEN = """() => {
  const focused = document.activeElement;
  focused.dataset.reached = "";
  return focused === document.body || getComputedStyle(focused).outlineStyle !== "none";
}"""


@pytest.mark.parametrize("options", SCHEMES, ids=["light", "dark", "phone"])
async def test_axe_finds_no_violation(cluster: Server, options: dict[str, Any]) -> None:
    from axe_playwright_python.async_playwright import Axe

    async with browsing(cluster, **options) as browser:
        await browser.open()
        await browser.shows("#cost-totals", "EUR")
        await browser.open_node("n2")
        await browser.page.locator("#plan-list summary").first.click()
        found = await Axe().run(browser.page)
        assert found.violations_count == 0, found.generate_report()
        await browser.page.locator("#submit").click()
        found = await Axe().run(browser.page)
        assert found.violations_count == 0, found.generate_report()


async def test_a_phone_shows_all_in_its_width(cluster: Server) -> None:
    async with browsing(cluster, **PHONE) as browser:
        await browser.open()
        await browser.shows("#task-rows", "gpt")
        await browser.shows("#cost-totals", "EUR")
        width = await browser.page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["viewport"]["width"]
        browser.check()


async def test_an_incident_leads_to_its_post_mortem(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.page.get_by_role("link", name="post-mortem of i1").click()
        await browser.page.wait_for_url("**/v1/incidents/i1/postmortem?format=html")
        assert "n1/1" in await browser.page.locator("body").inner_text()


async def test_a_plan_explains_itself_when_it_is_opened(cluster: Server) -> None:
    words = (await cluster.http.get("/v1/plans/p1")).json()["words"]
    async with browsing(cluster) as browser:
        await browser.open()
        opened = browser.page.locator("#plan-list details").filter(has_text="restart")
        await opened.locator("summary").click()
        await browser.shows("#plan-list .words", words.splitlines()[0])
        browser.check()


async def test_the_keyboard_stops_a_task_once_it_is_confirmed(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#task-rows", "gpt")
        stop = browser.page.get_by_role("button", name="Stop task gpt")
        await stop.focus()
        await browser.page.keyboard.press("Enter")
        await browser.shows("#confirm-heading", "Stop task gpt?")
        await browser.page.keyboard.press("Escape")
        await browser.page.locator("#confirm-dialog").wait_for(state="hidden")
        assert "task.stop-requested" not in await event_types(cluster)
        await stop.focus()
        await browser.page.keyboard.press("Enter")
        await browser.page.locator("#confirm-yes").focus()
        await browser.page.keyboard.press("Enter")
        await browser.shows("#message", "Task gpt is asked to stop.")
        assert (await event_types(cluster))[-1] == "task.stop-requested"
        browser.check()


async def test_the_keyboard_reaches_every_action_and_shows_where_it_is(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#task-rows", "gpt")
        await browser.shows("#plan-list", "restart")
        actions = browser.page.locator(ACTIONS)
        for _ in range(80):
            await browser.page.keyboard.press("Tab")
            assert await browser.page.evaluate(FOCUS_IS_SEEN)
        assert await actions.count() >= 10
        assert (
            await browser.page.locator(
                f"main :is(a, button:not(.cell), select, summary):visible:not({REACHED})"
            ).count()
            == 0
        )


async def test_an_open_incident_stands_out(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#summary", "● no trouble")
        now = datetime.now(UTC)
        await cluster.append(
            ErrorDetected,
            incident="i2",
            kind=ErrorKind.NODE_LOST,
            severity=Severity.SEV1,
            method=Method.NODE_HEALTH,
            detected_at=now,
            node="n1",
        )
        await browser.shows("#incident-rows tr.open", "node-lost")
        await browser.shows("#summary.trouble", "▲ 1 cause of trouble")
        assert await browser.page.title() == "▲ SEV1: node-lost of n1 - Unicron"
        browser.check()


async def test_nodes_are_in_the_order_of_their_numbers(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await cluster.join("n10", "n3")
        await browser.shows("#node-map", "n3")
        names = await browser.page.locator("#node-map .cell").evaluate_all(
            "(all) => all.map((one) => one.dataset.name)"
        )
        assert names == ["n0", "n1", "n2", "n3", "n10"]


async def test_what_each_worker_is_and_how_its_device_is(cluster: Server, bus: Bus) -> None:
    about: dict[str, Any] = {"name": "NVIDIA H200", "driver": "580.1", "memory_bytes": 150_754_820_096}
    cold = DeviceReading(
        device=0, workers=["n1/0"], temperature_c=36, utilisation_percent=98, memory_used_bytes=12_345_678_900, **about
    )
    hot = DeviceReading(device=1, workers=["n1/1"], temperature_c=92, **about)
    said = DeviceStatus(device=1, notes=["92 C, slows down at 90 C"], faults={"xid-31": 2})
    beat = heartbeat(node="n1", workers=[], devices=[said], device_readings=[cold, hot])
    await bus.publish(HEARTBEATS, beat, "n1")

    async def heard() -> bool:
        return bool((await cluster.http.get("/v1/nodes/n1")).json()["devices"])

    await until(heard)
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.open_node("n1")
        await browser.shows("#node-kinds", "NVIDIA H200, 151 GB; driver 580.1")
        devices = await browser.page.locator("#node-devices li").all_inner_texts()
        assert devices == [
            "0: 36 °C, 98 % busy, 12.3 GB used",
            "1: 92 °C, xid-31 2 times, 92 C, slows down at 90 C",
        ]
        assert await browser.page.locator("#node-devices li.said").count() == 1
        workers = await browser.page.locator("#node-workers li").all_inner_texts()
        assert any("n1/1 (device 1): " in text for text in workers)
        await browser.open_node("n0")
        workers = await browser.page.locator("#node-workers li").all_inner_texts()
        assert any("n0/0 (cpu): " in text for text in workers)
        browser.check()


async def test_a_node_is_drained_with_a_reason(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.open_node("n1")
        await browser.page.get_by_role("button", name="Drain node n1").click()
        await browser.page.get_by_label("Reason").fill("a new fan")
        await browser.page.locator("#confirm-yes").click()
        await browser.shows("#message", "Node n1 is being drained.")
        await browser.shows("#node-state", "a new fan")
        browser.check()


async def test_a_task_is_submitted_or_refused_with_the_reason(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.page.locator("#submit").click()
        text = browser.page.get_by_label("Specification (YAML)")
        await text.fill(yaml.safe_dump(cluster.spec("second", steps=0)))
        await browser.page.locator("#submit-form button[type=submit]").click()
        await browser.shows("#submit-problem", "steps")
        await text.fill(yaml.safe_dump(cluster.spec("second")))
        await browser.page.locator("#submit-form button[type=submit]").click()
        await browser.shows("#message", "Task second was submitted.")
        await browser.shows("#task-rows", "second")


async def test_the_example_of_a_submission_is_accepted(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.page.locator("#submit").click()
        await browser.shows("#submit-hint", "Paths are those of the nodes.")
        await browser.page.locator("#submit-example").click()
        await browser.page.locator("#submit-form button[type=submit]").click()
        await browser.shows("#message", "Task my-task was submitted.")
        browser.check()


async def test_what_the_api_refuses_is_shown_with_its_reason(cluster: Server, settings: Settings) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.open_node("n0")
        await browser.page.get_by_role("button", name="Drain node n0").click()
        await browser.page.set_extra_http_headers(bearer(settings, Scope.READ))  # fewer rights than when it was shown
        await browser.page.locator("#confirm-yes").click()
        await browser.shows("#confirm-problem", "Not allowed:")
        assert (await event_types(cluster)).count("node.draining") == 1


async def test_without_a_session_the_page_says_how_to_get_one(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.page.set_extra_http_headers({"Authorization": "Bearer wrong"})
        await browser.page.goto(cluster.url)
        await browser.shows("#no-session", "unicron open")
        assert not await browser.page.locator("#content").is_visible()


async def test_the_link_of_unicron_open_leads_to_the_page(cluster: Server, tmp_path: Path) -> None:
    path = (await cluster.http.post("/v1/browser-links")).json()["path"]
    async with browsing(cluster) as browser:
        await browser.page.goto(cluster.url + path)
        await browser.shows("#task-rows", "gpt")
        assert [cookie["httpOnly"] for cookie in await browser.page.context.cookies()] == [True]
