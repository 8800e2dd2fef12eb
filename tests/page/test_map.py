"""The map of nodes on the live page: size, filters, the details of a node, and the keyboard (`make test-page`)."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest

from shared.events.union import NodeJoined
from tests.api.kit import Server
from tests.page.kit import SCHEMES, Browser, browsing
from tests.page.test_troubles import lose

pytestmark = pytest.mark.page

CELLS = "#node-map .cell"


async def join(cluster: Server, number: int, *, per_rack: int = 8) -> list[str]:
    """Have nodes of eight workers join, in racks; return their names."""
    names = [f"gpu-{index:04d}" for index in range(number)]
    recorded = await cluster.journal.append(
        [
            NodeJoined(
                event_id=str(uuid.uuid4()),
                occurred_at=datetime.now(UTC),
                node=name,
                incarnation=name,
                agent_pid=1,
                domain=f"rack-{index // per_rack}",
                workers=[f"{name}/{slot}" for slot in range(8)],
            )
            for index, name in enumerate(names)
        ]
    )
    await cluster.projected(recorded[-1].position)
    return names


async def shown(browser: Browser) -> list[str]:
    """Return the names of the nodes on the map."""
    found: list[str] = await browser.page.locator(CELLS).evaluate_all("(all) => all.map((cell) => cell.dataset.name)")
    return found


async def focused(browser: Browser) -> str:
    return str(await browser.page.evaluate("document.activeElement.dataset.name ?? document.activeElement.id"))


async def test_64_nodes_of_8_workers_take_300_pixels(cluster: Server) -> None:
    names = await join(cluster, 61)  # beside three of the story
    async with browsing(cluster, viewport={"width": 1440, "height": 900}) as browser:
        await browser.open()
        await browser.shows("#cluster-text", "64 nodes, ")
        box = await browser.page.locator("#node-map").bounding_box()
        assert box["height"] <= 300
        assert sorted(await shown(browser)) == sorted(["n0", "n1", "n2", *names])
        first = browser.page.get_by_role("button", name="gpu-0000: ready; 8 unknown without a task")
        assert await first.locator("i").count() == 8
        browser.check()


@pytest.mark.parametrize("options", SCHEMES, ids=["light", "dark", "phone"])
async def test_more_nodes_are_a_heat_map_without_violations(cluster: Server, options: dict[str, Any]) -> None:
    from axe_playwright_python.async_playwright import Axe

    await join(cluster, 300, per_rack=16)
    await lose(cluster, "gpu-0007", "i2")
    async with browsing(cluster, **options) as browser:
        await browser.open()
        await browser.shows("#cluster-text", "303 nodes, 4 of 2406 workers in use, 1 lost, isolated or unreachable.")
        await browser.page.locator("#node-map.heat").wait_for()
        assert await browser.page.locator(f"{CELLS} i").count() == 0
        assert await browser.page.get_by_role("button", name="gpu-0007: lost, node-lost").inner_text() == "✕"
        await browser.page.get_by_role("button", name="gpu-0007: lost").click()
        await browser.shows("#node-heading", "Node gpu-0007")
        found = await Axe().run(browser.page)
        assert found.violations_count == 0, found.generate_report()
        width = await browser.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert width <= 0
        browser.check()


async def test_filters_leave_the_nodes_that_are_meant(cluster: Server) -> None:
    await join(cluster, 300, per_rack=16)
    await lose(cluster, "gpu-0007", "i2")
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.shows("#cluster-text", "303 nodes")
        await browser.page.locator("#filter-state").select_option("in trouble")
        await browser.shows("#cluster-text", "1 shown.")
        assert await shown(browser) == ["gpu-0007"]
        await browser.page.locator("#filter-state").select_option("all")
        await browser.page.locator("#filter-task").select_option("gpt")
        assert await shown(browser) == ["n0", "n1"]
        await browser.page.locator("#filter-task").select_option("no task")
        await browser.page.locator("#filter-domain").select_option("rack-2")
        await browser.page.locator("#filter-name").fill("GPU-004")
        await browser.drawn_again()
        assert await shown(browser) == [f"gpu-{index:04d}" for index in range(40, 48)]
        assert await browser.page.locator("#node-map.heat").count() == 0  # few are shown with their workers
        browser.check()


async def test_the_keyboard_moves_on_the_map_opens_a_node_and_comes_back(cluster: Server) -> None:
    await join(cluster, 61)
    async with browsing(cluster, viewport={"width": 1440, "height": 900}) as browser:
        await browser.open()
        await browser.shows("#cluster-text", "64 nodes")
        names = await shown(browser)
        keys = browser.page.keyboard
        await browser.page.locator("#filter-name").focus()
        await keys.press("Tab")
        assert await focused(browser) == names[0]
        await keys.press("Tab")  # the map is one stop
        assert await focused(browser) not in names
        await keys.press("Shift+Tab")
        for key, then in [
            ("ArrowRight", names[1]), ("End", names[-1]), ("ArrowLeft", names[-2]), ("Home", names[0]),
            ("ArrowRight", names[1]),
        ]:  # fmt: skip
            await keys.press(key)
            assert await focused(browser) == then, key
        await keys.press("ArrowDown")
        assert await focused(browser) in names[3:11]  # the rack below the three of the story
        await keys.press("ArrowUp")
        chosen = await focused(browser)
        assert chosen in names[:3]
        await browser.drawn_again()
        assert await focused(browser) == chosen
        await keys.press("Enter")
        await browser.shows("#node-heading", f"Node {chosen}")
        await browser.page.wait_for_function("() => document.activeElement.id === 'node-heading'")
        await browser.drawn_again()
        assert await focused(browser) == "node-heading"
        await keys.press("Escape")
        assert await browser.page.locator("#node-details").is_hidden()
        assert await focused(browser) == chosen
        browser.check()
