"""``unicron slow-workers``, and the post-mortem of a slow worker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from shared.bus.connection import Bus
from shared.log.journal import Journal
from shared.settings.model import Settings
from tests.api.kit import Server, serving
from tests.api.test_slow_workers import SLOW
from tests.cli.conftest import call_unicron
from tests.cli.golden_outputs import COLUMNS, compare
from tests.logs.kit import read_rows, restore

VERBS = {"slow-workers": ("slow-workers",)}
"""Name of the golden outputs -> the verb."""


@pytest.fixture
async def slow(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[Server]:
    """The gateway over the log of a slow worker."""
    restore(read_rows(SLOW), settings.run_dir / "log.db")
    async with serving(settings, bus, journal) as server:
        yield server


@pytest.mark.parametrize("columns", COLUMNS)
async def test_the_list_fits_the_width(slow: Server, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_COLUMNS", str(columns))
    for name, arguments in VERBS.items():
        compare(name, columns, await call_unicron(*arguments, server=slow.url))


async def test_a_worker_or_an_id_or_its_beginning_names_the_page(slow: Server) -> None:
    listed, _ = json.loads((await call_unicron("slow-workers", "-o", "json", server=slow.url)).out)["items"]
    for typed in (listed["id"], listed["id"][:3], "n0/0"):
        shown = await call_unicron("postmortem", typed, "-o", "json", server=slow.url)
        assert json.loads(shown.out)["slow"] == listed
    never = await call_unicron("postmortem", "n1/0", server=slow.url)
    assert (never.code, never.err) == (3, "unicron: worker 'n1/0' was never slow\n")
    unknown = await call_unicron("postmortem", "zz", server=slow.url)
    assert (unknown.code, unknown.err) == (3, "unicron: no incident 'zz'\n")
