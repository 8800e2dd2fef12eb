"""The page of a task: its course, its ranks' output, its faults and submissions."""

from __future__ import annotations

import pytest

from shared.settings.model import Settings
from tests.api.kit import Server
from tests.api.test_task_metrics import log
from tests.page.kit import SCHEMES, browsing

pytestmark = [pytest.mark.page, pytest.mark.timeout(120)]


async def test_the_name_of_a_task_leads_to_its_page(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.page.locator("#task-rows a", has_text="gpt").click()
        await browser.shows("#tasks-heading", "Task gpt")
        await browser.shows("#course-text", "At step 110, loss 2.500")
        await browser.shows("#course-text", "1 incident in this time")
        assert await browser.page.locator("#course-chart .uplot canvas").count() == 1
        await browser.shows("#incident-rows tr", "process-exit")
        await browser.shows("#plan-list", "restart (error)")
        await browser.shows("#rank-rows tr:nth-child(4)", "n1/1")
        await browser.shows("#attempt-rows", "running")
        await browser.shows("#specification-text", '"name": "gpt"')
        # No node answers here: what is missing is said where the lines would be.
        await browser.shows("#output-text", "unicron: ")
        assert await browser.page.locator("#cluster").is_hidden()
        await browser.page.locator("a", has_text="Cluster").click()
        await browser.shows("#node-map", "n0")
        browser.check()


async def test_metrics_are_shown_as_they_are_chosen(cluster: Server, settings: Settings) -> None:
    async with browsing(cluster) as browser:
        await browser.open(path="/tasks/gpt")
        await browser.shows("#course-text", "At step 110")
        assert await browser.page.locator("#metrics").is_hidden()
        for step in (10, 20, 30):
            log(settings.run_dir, 1, "n0/0", 0, [step], grad_norm=step / 8, lr=1 / step)
        await browser.page.reload()
        await browser.shows("#metrics-text", "grad_norm 3.750 at step 30")
        await browser.page.select_option("#metric-second", "lr")
        await browser.shows("#metrics-text", "grad_norm 3.750 at step 30; lr 0.03333 at step 30")
        assert await browser.page.locator("#metrics-chart .uplot canvas").count() == 1
        browser.check()


async def test_a_task_that_there_is_not_is_said_to_be_none(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.page.goto(f"{cluster.url}/tasks/none")
        await browser.shows("#no-tasks", "There is no task none.")


@pytest.mark.parametrize("scheme", SCHEMES, ids=["light", "dark", "phone"])
async def test_the_page_of_a_task_is_accessible_and_fits(cluster: Server, scheme: dict[str, object]) -> None:
    from axe_playwright_python.async_playwright import Axe

    async with browsing(cluster, **scheme) as browser:
        await browser.open(path="/tasks/gpt")
        await browser.shows("#course-text", "At step 110")
        found = await Axe().run(browser.page)
        assert found.violations_count == 0, found.generate_report()
        wide = await browser.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0
        browser.check()
