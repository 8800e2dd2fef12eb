"""A browser that looks at the live page of a real gateway, and notes what must not happen."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from services.api.routers.health import SERVICES
from shared.bus.connection import Bus
from shared.events.plans import Problem, Trigger
from shared.events.union import NodeDraining
from shared.messages.health import HEALTH, Health
from tests.api.kit import Server, Story, spec
from tests.api.test_ledger import solution
from tests.condition import until

LIMIT_MS = 30_000
"""For whatever a page is waited for; a browser on a busy machine takes seconds to start."""

MARKUP = "<img src=x onerror=alert(1)>"
"""A reason that would be markup, were it not shown as text."""

PHONE = {"viewport": {"width": 360, "height": 740}}
SCHEMES: list[dict[str, Any]] = [{"color_scheme": "light"}, {"color_scheme": "dark"}, {"color_scheme": "dark", **PHONE}]
"""What a page is looked at with."""


class Recent(Story):
    """A story that began some minutes ago, so that the page's chart shows it."""

    def __init__(self, path: Path, ago_s: float = 300.0) -> None:
        self._start = datetime.now(UTC) - timedelta(seconds=ago_s)
        super().__init__(path)

    def time(self, seconds: float | None = None) -> datetime:
        return self._start + timedelta(seconds=self.seconds if seconds is None else seconds)


def write_story(path: Path) -> None:
    """Write a log: a task trains on two nodes, lost a process and is whole again; a third node drains."""
    story = Recent(path)
    story.running()
    best = solution(gpt=1.5 * spec().batch.global_ * spec().model.flop_per_sample())
    story.at(21).plan("p0", problem=Problem(workers=4, tasks=[]), solution=best, trigger=Trigger.NODE_JOINED)
    story.process_exit().process_restored()
    story.at(110).node("n2")
    story.at(111).add(NodeDraining, node="n2", by="user", actor="uid/0", reason=MARKUP, timeout_s=600.0)
    story.at(120).progress("gpt", 110, 1.0, generation=3)
    story.log.close()


async def serve_parts(bus: Bus) -> dict[str, Health]:
    """Answer for the other services of the control plane; return what they answer: they work, and lack no event."""
    answers = {name: Health(ready=True, handled=2**31) for name in SERVICES}
    for name in SERVICES:

        async def answer(_: None, name: str = name) -> Health:
            return answers[name]

        await bus.serve(HEALTH, answer, name)
    return answers


async def event_types(server: Server) -> list[str]:
    """Return the types of all events, in their order."""
    answer = await server.http.get("/v1/events", params={"limit": 1000})
    return [item["type"] for item in answer.json()["items"]]


def missing() -> str:
    """Return why there can be no browser; empty: there can."""
    for name in ("playwright", "axe_playwright_python"):
        if find_spec(name) is None:
            return f"the extra `page` is not installed: {name}"
    return "" if chromium() else "there is no chromium"


def chromium() -> str | None:
    """Return Debian's browser, or the one that UNICRON_CHROMIUM names."""
    return os.environ.get("UNICRON_CHROMIUM") or shutil.which("chromium")


@dataclass
class Browser:
    """A page of the browser, with what its console said and what it asked for."""

    page: Any
    """``playwright.async_api.Page``."""
    url: str
    """Of the server."""
    errors: list[str] = field(default_factory=list)
    origins: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(LIMIT_MS)
        self.page.on("console", self._note_message)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "request", lambda request: self.origins.add("{0.scheme}://{0.netloc}".format(urlsplit(request.url)))
        )

    def _note_message(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    async def open(self, connection: str = "● live", path: str = "") -> None:
        """Open a page, and wait until it follows the log; ``connection``: what it then says of its connection."""
        await self.page.goto(self.url + path)
        await self.shows("#connection:not(.trouble)", connection)

    async def shows(self, selector: str, text: str) -> None:
        """Wait until an element shows a text."""
        await self.page.locator(selector).filter(has_text=text).first.wait_for(timeout=LIMIT_MS)

    async def open_node(self, name: str) -> None:
        """Show the details of a node of the map."""
        await self.page.locator(f"#node-map [data-name='{name}']").click()
        await self.shows("#node-heading", f"Node {name}")

    async def drawn_at_ms(self) -> float | None:
        """Return when the page has shown what it asked for last, since it was opened; None: it has not yet."""
        found: list[float] = await self.page.evaluate(
            "performance.getEntriesByName('shown').map((mark) => mark.startTime)"
        )
        return found[-1] if found else None

    async def drawn_again(self) -> None:
        """Wait until the page has asked once more, and shown it."""
        before = await self.drawn_at_ms()

        async def later() -> bool:
            return await self.drawn_at_ms() not in (None, before)

        await until(later)

    def check(self) -> None:
        """Nothing was wrong, and nothing came from elsewhere."""
        assert self.errors == []
        assert self.origins == {self.url}


async def opened_ms(url: str) -> float:
    """Open the page in a browser that does not know it; return after how long it had shown all that it asks for."""
    async with browsing_at(url) as browser:
        await browser.page.goto(url)

        async def drawn() -> bool:
            return await browser.drawn_at_ms() is not None

        await until(drawn)
        found = await browser.drawn_at_ms()
        browser.check()
        assert found is not None
        return found


@asynccontextmanager
async def browsing(server: Server, **options: Any) -> AsyncIterator[Browser]:
    """Open a browser. ``options``: of its context, such as ``viewport`` and ``color_scheme``."""
    async with browsing_at(server.url, **options) as browser:
        yield browser


@asynccontextmanager
async def browsing_at(url: str, **options: Any) -> AsyncIterator[Browser]:
    """Open a browser, as ``browsing``."""
    if reason := missing():
        if os.environ.get("UNICRON_REQUIRE_PAGE"):
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.async_api import async_playwright

    async with async_playwright() as started:
        # Chromium's own sandbox needs user namespaces, which containers mostly have not.
        browser = await started.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        context = await browser.new_context(**options)
        try:
            yield Browser(await context.new_page(), url)
        finally:
            await context.close()
            await browser.close()
