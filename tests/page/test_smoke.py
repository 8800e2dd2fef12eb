"""The live page in a browser, as far as `make test` looks at it; `make test-page` looks at the rest."""

from __future__ import annotations

from shared.events.union import NodeJoined
from tests.api.kit import Server
from tests.page.kit import MARKUP, browsing


async def test_the_page_shows_the_cluster_and_follows_the_log(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        page = browser.page
        await browser.shows("#task-rows", "gpt")
        await browser.shows("#node-map", "n0")
        await browser.open_node("n2")
        await browser.shows("#node-state", MARKUP)
        await browser.shows("#cost-totals", "EUR")
        assert "process-exit" in await page.locator("#incident-rows tr").inner_text()
        assert await page.locator(".uplot canvas").count() == 1
        await page.evaluate("window.unicronTest = 'the same document'")
        await cluster.append(NodeJoined, node="late", incarnation="x", agent_pid=1, domain="d", workers=["late/0"])
        await browser.shows("#node-map", "late")
        assert await page.evaluate("window.unicronTest") == "the same document"
        browser.check()
