"""``unicron open``."""

from __future__ import annotations

import json
import webbrowser

import httpx
import pytest

from tests.api.kit import Server
from tests.cli.conftest import Unicron


async def test_the_link_opens_a_session_that_revoke_ends(api: Server, unicron: Unicron) -> None:
    outcome = await unicron("open")
    assert (outcome.code, outcome.err, outcome.out.count("\n")) == (0, "", 1)
    async with httpx.AsyncClient(timeout=40) as browser:
        assert (await browser.get(outcome.out.strip())).status_code == 200
        assert browser.cookies
    assert (await unicron("open", "--revoke")).out == "ended: 1\n"
    assert json.loads((await unicron("open", "--revoke", "--everybody", "-o", "json")).out) == {"ended": 0}


async def test_a_browser_is_started_only_on_request(unicron: Unicron, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def starts(url: str) -> bool:
        opened.append(url)
        return len(opened) == 1

    monkeypatch.setattr(webbrowser, "open", starts)
    made = json.loads((await unicron("open", "-o", "json")).out)
    assert set(made) == {"url", "expires_at"}
    assert opened == []
    outcome = await unicron("open", "--browse")
    assert (outcome.code, opened) == (0, [outcome.out.strip()])
    outcome = await unicron("open", "--browse")
    assert "no browser was found" in outcome.err
    assert outcome.out.strip() == opened[-1]


@pytest.mark.parametrize("arguments", [["--everybody"], ["--revoke", "--browse"]])
async def test_options_that_do_not_go_together(unicron: Unicron, arguments: list[str]) -> None:
    outcome = await unicron("open", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
