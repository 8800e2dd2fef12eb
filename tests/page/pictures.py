"""The pictures of the README: ``make screenshots``.

    python -m tests.page.pictures [FOLDER]

A real gateway serves the log of a demo (``tests/logs``) up to a moment after the last fault, with times
as if that were now; Debian's chromium looks at its live page, light and dark, and at the post-mortem of the lost node.
The pictures have 128 colours, so that each is a small file.
"""

from __future__ import annotations

import asyncio
import io
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

from PIL import Image

from shared.bus.connection import Bus
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.settings.model import Settings
from tests.api.kit import Server, serving
from tests.logs.kit import Row, forge, golden_log, read_rows, restore
from tests.nats_server import OpenServer
from tests.page.kit import Browser, browsing, missing, serve_parts

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "images"
LOG = golden_log("demo")
AGO = timedelta(seconds=1)
"""Age of that event."""
WIDTH, HEIGHT = 1100, 1000
MOST_BYTES = 200_000
_COLOURS = 128
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)")


def recent_rows(now: datetime) -> list[Row]:
    """Return the first rows of the demo's log, with all times moved so that the last one is of ``now``."""
    rows = read_rows(LOG)
    slowed = max(index for index, row in enumerate(rows) if row["type"] == "worker.slowed")
    # Up to where both tasks train again, and a slow worker was left out.
    rows = rows[: next(i for i, row in enumerate(rows) if i > slowed and row["type"] == "task.progressed") + 1]
    moved = now - AGO - datetime.fromisoformat(rows[-1]["recorded_at"])

    def later(found: re.Match[str]) -> str:
        return (datetime.fromisoformat(found[0]) + moved).isoformat(timespec="microseconds")

    changed = [
        {name: _TIME.sub(later, value) if isinstance(value, str) else value for name, value in row.items()}
        for row in rows
    ]
    return forge(changed, lambda event: None)


def small(png: bytes) -> bytes:
    """Return a picture with few colours.

    Raises:
        ValueError: it is too large all the same.
    """
    with Image.open(io.BytesIO(png)) as image:
        few = image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    target = io.BytesIO()
    few.save(target, "PNG", optimize=True)
    if target.tell() >= MOST_BYTES:
        raise ValueError(f"a picture of {target.tell()} bytes; {MOST_BYTES} are allowed")
    return target.getvalue()


async def take(server: Server, folder: Path, **options: str) -> None:
    """Take the live page's picture in one colour scheme."""
    async with browsing(server, viewport={"width": WIDTH, "height": HEIGHT}, **options) as browser:
        await browser.open()
        async with browser.page.expect_response(lambda answer: "/v1/waf" in answer.url):
            await browser.page.locator("#waf-window").select_option("60")
        await browser.shows("#task-rows", "demo-gpt-large")
        await browser.shows("#cost-totals", "USD")
        await browser.drawn_again()
        await _save(browser, folder / f"page-{options['color_scheme']}.png")


async def take_post_mortem(server: Server, folder: Path) -> None:
    """Take the picture of the post-mortem of the lost node."""
    async with browsing(server, viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light") as browser:
        incidents = (await server.http.get("/v1/incidents")).json()["items"]
        lost = next(incident["id"] for incident in incidents if incident["kind"] == "node-lost")
        await browser.page.goto(f"{server.url}/v1/incidents/{lost}/postmortem?format=html")
        await _save(browser, folder / "postmortem.png")


async def _save(browser: Browser, path: Path) -> None:
    browser.check()
    _write(path, small(await browser.page.screenshot()))


def _write(path: Path, picture: bytes) -> None:
    path.write_bytes(picture)
    print(f"{path.name}: {len(picture)} bytes")


@asynccontextmanager
async def demo() -> AsyncIterator[Server]:
    """Serve the demo's log as if its last event were of now."""
    async with AsyncExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unicron-pictures-")))
        nats = await stack.enter_async_context(OpenServer(run_dir / "nats"))
        bus = await Bus.connect(nats.url, credential=nats.credential, name="pictures")
        stack.push_async_callback(bus.close)
        await serve_parts(bus)
        restore(recent_rows(datetime.now(UTC)), run_dir / "log.db")
        log = stack.enter_context(closing(EventLog(f"sqlite:///{run_dir / 'log.db'}")))
        journal = await stack.enter_async_context(Journal(log, bus))
        settings = Settings(node="n0", run_dir=run_dir, nats_url=nats.url, nats_credential=nats.credential_file, port=0)
        yield await stack.enter_async_context(serving(settings, bus, journal))


async def take_all(folder: Path) -> None:
    """Take all pictures, each of a gateway of its own: time goes on, and the page shows the last minute."""
    for scheme in ("light", "dark"):
        async with demo() as server:
            await take(server, folder, color_scheme=scheme)
    async with demo() as server:
        await take_post_mortem(server, folder)


def main() -> int:
    """Take the pictures; return the exit status."""
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(take_all(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
