"""``unicron postmortem`` against a real server."""

from __future__ import annotations

import json
from pathlib import Path

from tests.api.kit import Server
from tests.cli.conftest import call_unicron


async def test_the_page_is_written_in_three_forms(healed: Server, tmp_path: Path) -> None:
    as_text = await call_unicron("postmortem", "i1", server=healed.url)
    assert as_text.code == 0
    assert as_text.out.startswith("# SEV2: process-exit of n1/1")
    file = tmp_path / "i1.html"
    written = await call_unicron("postmortem", "i1", "-o", "html", "--file", str(file), server=healed.url)
    assert (written.code, written.out) == (0, f"{file}\n")
    assert file.read_text().startswith("<!doctype html>")
    as_json = await call_unicron("postmortem", "i1", "-o", "json", server=healed.url)
    assert json.loads(as_json.out)["incident"]["id"] == "i1"


async def test_what_is_wrong_is_said_in_a_sentence(healed: Server, tmp_path: Path) -> None:
    unknown = await call_unicron("postmortem", "i9", server=healed.url)
    assert (unknown.code, unknown.out, unknown.err) == (3, "", "unicron: no incident 'i9'\n")
    missing = tmp_path / "no-such-folder" / "page.md"
    refused = await call_unicron("postmortem", "i1", "--file", str(missing), server=healed.url)
    assert (refused.code, refused.out) == (2, "")
    assert f"--file: '{missing}': No such file or directory" in refused.err


async def test_the_page_in_a_browser_may_use_its_own_style_alone(healed: Server) -> None:
    response = await healed.http.get("/v1/incidents/i1/postmortem", params={"format": "html"})
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    markdown = await healed.http.get("/v1/incidents/i1/postmortem", params={"format": "md"})
    assert markdown.headers["content-type"] == "text/markdown; charset=utf-8"
    refused = await healed.http.get("/v1/incidents/i1/postmortem", params={"format": "pdf"})
    assert refused.status_code == 422
