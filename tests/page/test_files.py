"""The files of the live page, without a browser: their headers, their weight, and what is not in them."""

from __future__ import annotations

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from services.api.page.assets import assets
from tests.api.conftest import offline
from tests.api.kit import Server
from tests.page.kit import browsing

__all__ = ["offline"]

MOST_BYTES = 300_000
MOST_PICTURE_BYTES = 200_000
TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
FOLDER = Path(__file__).resolve().parents[2] / "services" / "api" / "page"
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
VOID = {"input", "link", "meta"}


class Page(HTMLParser):
    """Reads a page, and notes elements that do not match, and what is inside of the page and should be a file."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.labels: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.wrong += [f"{tag} {name}" for name in given if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.wrong.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value for name, value in attrs if name in ("src", "href") and value]
        self.labels += [value for name, value in attrs if name in ("for", "aria-labelledby") and value]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"/{tag}")


def page() -> Page:
    found = Page()
    found.feed((FOLDER / "index.html").read_text())
    found.close()
    return found


async def test_every_file_has_its_type_its_policy_and_a_tag(offline: httpx.AsyncClient) -> None:
    names = ["/", *(f"/page/{name}" for name in assets() if name != "index.html")]
    for name in names:
        answer = await offline.get(name)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == TYPES.get(name.rpartition(".")[2], "text/html; charset=utf-8")
        found = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert found == POLICY
        assert (answer.headers["cache-control"], answer.headers["x-content-type-options"]) == ("no-cache", "nosniff")
        again = await offline.get(name, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", answer.headers["etag"])
        other = await offline.get(name, headers={"If-None-Match": '"other"'})
        assert other.status_code == 200


async def test_the_files_need_no_credentials_and_nothing_else_is_sent(offline: httpx.AsyncClient) -> None:
    del offline.headers["Authorization"]
    assert (await offline.get("/")).status_code == 200
    assert (await offline.get("/page/page.js")).status_code == 200
    assert (await offline.get("/v1/tasks")).status_code == 401
    for name in ("assets.py", "uPlot.LICENSE", "none.js", "..%2Fmain.py", "%2e%2e/main.py"):
        assert (await offline.get(f"/page/{name}")).status_code in (401, 404)


def test_the_page_weighs_less_than_it_may() -> None:
    assert sum(len(asset.content) for asset in assets().values()) < MOST_BYTES


def test_the_page_is_whole_and_has_nothing_inline() -> None:
    found = page()
    assert (found.wrong, found.open) == ([], [])
    assert len(found.ids) == len({*found.ids})
    assert {*found.labels} <= {*found.ids}


def test_all_that_is_named_is_there_and_here() -> None:
    """No file is loaded from elsewhere, and each that is loaded exists."""
    named = [link for link in page().links if not link.startswith("#") and link not in ("/", "/docs")]
    assert all(link.startswith("/page/") and link.removeprefix("/page/") in assets() for link in named)
    for path in FOLDER.glob("[!u]*.js"):
        assert {*re.findall(r'from "\./([\w.]+)"', path.read_text())} <= assets().keys()


def test_every_module_is_asked_for_with_the_page() -> None:
    """Else a browser asks for those that a module imports once it has that module."""
    modules = {f"/page/{path.name}" for path in FOLDER.glob("[!u]*.js")}
    assert modules <= {*page().links}


def test_every_element_that_a_module_asks_for_is_on_the_page() -> None:
    ids = {*page().ids}
    for path in FOLDER.glob("[!u]*.js"):
        assert {*re.findall(r'byId\("([\w-]+)"\)', path.read_text())} <= ids


@pytest.mark.parametrize("word", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "http://"])
def test_no_module_makes_markup_of_text(word: str) -> None:
    for path in FOLDER.glob("[!u]*.js"):
        assert word not in path.read_text()


@pytest.mark.parametrize("package", ["services.api.page", "services.api.postmortem"])
def test_every_file_is_installed(package: str) -> None:
    root = FOLDER.parents[2]
    tool = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert package in tool["packages"]
    folder, data = root / package.replace(".", "/"), tool["package-data"]
    patterns = [*data["*"], *data.get(package, [])]
    installed = {path for pattern in (*patterns, "*.py") for path in folder.glob(pattern)}
    there = {path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert there <= installed


def test_the_pictures_of_the_readme_are_small_and_shown() -> None:
    root = FOLDER.parents[2]
    readme = (root / "README.md").read_text()
    pictures = {*(root / "docs" / "images").glob("*.png")}
    assert {path.name for path in pictures} == {"page-light.png", "page-dark.png", "postmortem.png"}
    assert all(f"docs/images/{path.name}" in readme and path.stat().st_size < MOST_PICTURE_BYTES for path in pictures)


@pytest.mark.page
async def test_the_interface_is_described_without_the_internet(cluster: Server) -> None:
    async with browsing(cluster) as browser:
        await browser.page.goto(f"{cluster.url}/docs")
        await browser.shows(".opblock-summary-path", "/v1/troubles")
        browser.check()
