"""The live page while the gateway is frozen, away or slow, and without a session (`make test-page`)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.api.kit import Server
from tests.api.test_process import environment, start
from tests.condition import until
from tests.nats_server import OpenServer
from tests.page.kit import Browser, browsing, browsing_at, write_story

pytestmark = pytest.mark.page

MOST_AGE_S = 10
MOST_REQUESTS = 50
AWAY_S = 45
WHEN_LATE = """() => {
  const connection = document.getElementById("connection");
  return connection.classList.contains("trouble") && document.getElementById("as-of").textContent;
}"""


@dataclass
class Gateway:
    """The service as a process of its own."""

    process: asyncio.subprocess.Process
    url: str


async def begun(nats: OpenServer, run_dir: Path, port: int = 0) -> Gateway:
    process = await start(environment(nats, run_dir, port), run_dir)
    assert process.stdout is not None
    async with asyncio.timeout(100):
        assert await process.stdout.readline() == b"ready\n"
    return Gateway(process, f"http://127.0.0.1:{(run_dir / 'services' / 'api.port').read_text().strip()}")


async def end(gateway: Gateway) -> None:
    if gateway.process.returncode is None:
        gateway.process.kill()
    await gateway.process.communicate()


@pytest.fixture
async def gateway(nats: OpenServer, tmp_path: Path) -> AsyncIterator[Gateway]:
    write_story(tmp_path / "log.db")
    found = await begun(nats, tmp_path)
    try:
        yield found
    finally:
        await end(found)


def asked(browser: Browser) -> list[str]:
    """Return a list to which the paths that the page asks for are added from now on."""
    found: list[str] = []
    browser.page.on("request", lambda request: found.append(request.url.removeprefix(browser.url)))
    return found


ALONE = "△ up to date"
"""What the page says where it follows the log, of a gateway beside which no other service runs: so it is not live."""


async def test_a_frozen_gateway_is_noticed_within_ten_seconds(gateway: Gateway) -> None:
    async with browsing_at(gateway.url) as browser:
        await browser.open(ALONE)
        await browser.shows("#as-of", "UTC")
        gateway.process.send_signal(signal.SIGSTOP)
        try:
            found = await browser.page.wait_for_function(WHEN_LATE)
            as_of = str(await found.json_value())
            assert int(as_of.split(", ")[1].split()[0]) <= MOST_AGE_S, as_of
            await browser.shows("#connection", "the server does not answer")
            assert await browser.page.title() == "▲ not up to date - Unicron"
            assert await browser.page.locator("#task-rows").is_visible()
        finally:
            gateway.process.send_signal(signal.SIGCONT)
        await browser.shows("#connection:not(.trouble)", ALONE)
        assert "not up to date" not in await browser.page.title()


async def test_a_gateway_that_is_away_is_asked_ever_more_seldom(
    gateway: Gateway, nats: OpenServer, tmp_path: Path
) -> None:
    async with browsing_at(gateway.url) as browser:
        await browser.page.clock.install()
        await browser.open(ALONE)
        await end(gateway)
        await browser.shows("#connection.trouble", "not up to date")
        found = asked(browser)
        for _ in range(AWAY_S):
            await browser.page.clock.run_for(1000)
            await browser.page.evaluate("fetch('/v1/none').catch(() => {})")  # what was asked before has failed now
        requests = [path for path in found if path != "/v1/none"]
        assert 5 <= len(requests) <= MOST_REQUESTS, requests
        again = await begun(nats, tmp_path, int(gateway.url.rpartition(":")[2]))
        connection = browser.page.locator("#connection:not(.trouble)")

        async def heard_again() -> bool:  # of a request that was sent before the gateway listened comes a pause, too
            await browser.page.clock.run_for(1000)
            return ALONE in (await connection.all_inner_texts())

        try:
            await until(heard_again)
        finally:
            await end(again)


async def test_everything_is_asked_for_once_when_the_page_is_opened(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        found = asked(browser)
        await browser.open()
        await browser.shows("#cost-totals", "EUR")
        await browser.drawn_again()  # by then what was asked for twice has been
        for path in ("/v1/actor", "/v1/plans"):
            assert len([one for one in found if one.startswith(path)]) == 1, found
        browser.check()


async def never(_: Any) -> None:
    """Answer no request."""
    await asyncio.Event().wait()


async def test_nothing_is_said_of_what_was_not_answered(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.page.route("**/v1/troubles", never)
        await browser.page.goto(browser.url)
        await browser.shows("#cost-totals", "EUR")
        assert await browser.page.locator("#summary").inner_text() == ""
        assert not await browser.page.locator("#no-tasks").is_visible()
        await browser.shows("#connection.trouble", "not up to date")
        await browser.page.unroute_all(behavior="ignoreErrors")


async def test_sums_that_take_long_keep_nothing_else_waiting(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        for path in ("costs", "waf"):
            await browser.page.route(f"**/v1/{path}?*", never)
        await browser.open()
        await browser.shows("#task-rows", "gpt")
        await browser.shows("#incident-rows", "process-exit")
        await browser.page.unroute_all(behavior="ignoreErrors")


async def test_a_session_that_has_ended_is_said_and_another_one_is_used_at_once(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.page.set_extra_http_headers({"Authorization": "Bearer wrong"})
        await browser.shows("#no-session-heading", "The session of this browser has ended")
        await browser.shows("#no-session", "unicron open")
        words = await browser.page.locator("body").inner_text()
        assert not [word for word in ("uid", "UNICRON_TOKEN", "token list") if word in words]
        assert not await browser.page.locator("#content").is_visible()
        assert not await browser.page.locator("#summary").is_visible()
        await browser.page.set_extra_http_headers({})
        await browser.shows("#task-rows", "gpt")
        await browser.shows("#connection:not(.trouble)", "● live")
        assert not await browser.page.locator("#no-session").is_visible()


async def test_a_dialog_says_that_the_session_has_ended(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.open()
        await browser.open_node("n0")
        await browser.page.get_by_role("button", name="Drain node n0").click()
        await browser.page.set_extra_http_headers({"Authorization": "Bearer wrong"})
        await browser.page.locator("#confirm-yes").click()
        await browser.shows("#confirm-problem", "this browser's session has ended: the command `unicron open`")
