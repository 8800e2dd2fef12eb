"""What the tests of post-mortems share: a golden log with its projections, and a page read as a browser does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

from services.api.store.projection_store import Store
from shared.events.union import Recorded
from shared.log.log import EventLog
from tests.logs.kit import read_rows, restore


@contextmanager
def history(golden: Path, folder: Path) -> Iterator[tuple[EventLog, Store, list[Recorded]]]:
    """Give a golden log, the projections of it, and its records."""
    log = EventLog(f"sqlite:///{restore(read_rows(golden), folder / 'log.db')}", read_only=True)
    store = Store(f"sqlite:///{folder / 'projections.db'}")
    records = list(log.read_all())
    store.fold(records)
    try:
        yield log, store, records
    finally:
        store.close()
        log.close()


class ParsedPage(HTMLParser):
    """The texts of a page by the section that they are in, and what the page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.loads: list[str] = []
        self.open: list[str] = []
        self._section = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "section":
            self._section = given.get("id") or ""
        if tag in ("script", "link", "img", "iframe") or "src" in given or (given.get("href") or "#")[0] != "#":
            self.loads.append(f"{tag} {given}")
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        self.sections[self._section] = self.sections.get(self._section, "") + data
