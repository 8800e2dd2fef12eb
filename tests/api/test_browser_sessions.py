"""Links that begin a browser's session, and what the session may do."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from http.cookies import Morsel, SimpleCookie
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from services.api.access.browser_sessions import LINK_S, MOST_OF_ONE, SESSION_S, Bearer, BrowserSessions, cookie_name
from services.api.gateway import Gateway
from shared.bus.connection import Bus
from shared.errors import NotFound, Unavailable
from shared.events.union import TaskSubmitted
from shared.log.journal import Journal
from shared.model import utc_now
from shared.service import tokens
from shared.service.metrics import new_registry
from shared.service.tokens import Scope
from shared.settings.model import Settings
from tests.api.kit import Server, bearer, client_of, client_of_app, offline_gateway, prepared, serving
from tests.api.test_access import refused, self_signed

OWN = {"Origin": "http://localhost"}


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = datetime(2025, 3, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


class Site:
    """An application, a client of it that has a token, and browsers."""

    def __init__(self, gateway: Gateway, app: FastAPI, client: httpx.AsyncClient, clock: Clock) -> None:
        self.gateway, self.app, self.client, self.clock = gateway, app, client, clock

    def start_again(self, sessions: BrowserSessions) -> None:
        self.gateway.sessions, self.gateway.registry = sessions, new_registry()
        self.app = prepared(self.gateway)

    async def link(self, headers: dict[str, str] | None = None) -> str:
        made = await self.client.post("/v1/browser-links", headers=headers)
        assert made.status_code == 201
        path: str = made.json()["path"]
        return path

    def browser(self, base_url: str = "http://localhost") -> httpx.AsyncClient:
        return client_of_app(self.app, base_url=base_url)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """An application without bus and log, whose sessions have a clock of the test's."""
    with offline_gateway(tmp_path) as gateway:
        clock = Clock()
        gateway.sessions = BrowserSessions(tmp_path / "browser-sessions.json", clock)
        app = prepared(gateway)
        async with client_of_app(app, headers=bearer(gateway.settings)) as client:
            yield Site(gateway, app, client, clock)


def cookie_in(answer: httpx.Response) -> Morsel[str]:
    [morsel] = SimpleCookie(answer.headers["set-cookie"]).values()
    return morsel


async def test_a_link_begins_one_session_and_leads_to_the_site(site: Site) -> None:
    path = await site.link()
    async with site.browser() as browser, site.browser() as thief:
        refused(await browser.get("/v1/nodes"), 401, "unauthenticated")
        page = await browser.get(path)
        assert (page.status_code, page.headers["cache-control"]) == (200, "no-store")
        assert 'http-equiv="refresh" content="0; url=/"' in page.text
        assert path.rpartition("/")[2] not in page.text
        assert (await browser.get("/", follow_redirects=True)).status_code == 200
        assert (await browser.get("/v1/nodes")).status_code == 200
        assert "`unicron open`" in refused(await thief.get(path), 404, "not-found")
        assert "set-cookie" not in (await thief.get(path)).headers
        refused(await thief.get("/v1/nodes"), 401, "unauthenticated")


async def test_two_at_a_time_do_not_both_open_a_link(site: Site) -> None:
    path = await site.link()
    async with site.browser() as one, site.browser() as other:
        answers = await asyncio.gather(one.get(path), other.get(path))
    assert sorted(answer.status_code for answer in answers) == [200, 404]


async def test_no_script_and_no_other_site_gets_the_cookie(site: Site) -> None:
    async with site.browser() as browser:
        cookie = cookie_in(await browser.get(await site.link()))
    assert (cookie["httponly"], cookie["samesite"], cookie["path"], cookie["secure"]) == (True, "strict", "/", "")
    assert (int(cookie["max-age"]), cookie["domain"], cookie.key) == (SESSION_S, "", "unicron-session")


async def test_with_tls_the_cookie_is_sent_over_tls_only(
    settings: Settings, bus: Bus, journal: Journal, tmp_path: Path
) -> None:
    certificate, key = self_signed(tmp_path)
    changed = settings.model_copy(update={"tls_certificate": certificate, "tls_key": key})
    async with serving(changed, bus, journal) as api:
        url = api.url.replace("http:", "https:")
        async with httpx.AsyncClient(base_url=url, verify=False) as client:
            path = (await client.post("/v1/browser-links")).json()["path"]
            cookie = cookie_in(await client.get(path))
            assert (cookie["secure"], cookie.key) == (True, f"__Host-unicron-session-{client.base_url.port}")
            plain = {"Origin": api.url, "Cookie": f"{cookie.key}={cookie.value}"}
            assert (await client.get("/v1/nodes", headers=plain)).status_code == 200
            refused(await client.request("DELETE", "/v1/browser-sessions", headers=plain), 403, "cross-origin")
            own = {"Origin": url, "Cookie": f"{cookie.key}={cookie.value}"}
            assert (await client.request("DELETE", "/v1/browser-sessions", headers=own)).json() == {"ended": 1}


def test_servers_at_several_ports_of_a_host_have_cookies_of_their_own() -> None:
    def name(host: str, scheme: str = "http") -> str:
        return cookie_name({"type": "http", "scheme": scheme, "headers": [(b"host", host.encode())]})

    assert name("localhost:8642") != name("localhost:8643")
    assert name("[::1]:8642", "https") == "__Host-unicron-session-8642"
    assert name("localhost:x") == name("localhost") == name("")


async def test_a_link_expires(site: Site) -> None:
    late, timely = await site.link(), await site.link()
    site.clock.pass_s(LINK_S - 1)
    async with site.browser() as browser:
        assert (await browser.get(timely)).status_code == 200
        site.clock.pass_s(1)
        refused(await browser.get(late), 404, "not-found")


async def test_a_session_expires(site: Site) -> None:
    async with site.browser() as browser:
        await browser.get(await site.link())
        browser.cookies.jar.clear_expired_cookies()
        site.clock.pass_s(SESSION_S - 1)
        assert (await browser.get("/v1/nodes")).status_code == 200
        site.clock.pass_s(1)
        assert "session has ended" in refused(await browser.get("/v1/nodes"), 401, "unauthenticated")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://localhost:9999"},
        {"Origin": "http://[localhost"},
        {"Origin": "http://localhost", "Sec-Fetch-Site": "same-site"},
    ],
)
async def test_a_change_comes_from_a_page_of_this_server_and_from_no_other(site: Site, headers: dict[str, str]) -> None:
    async with site.browser() as browser:
        await browser.get(await site.link())
        refused(await browser.request("DELETE", "/v1/browser-sessions", headers=headers), 403, "cross-origin")
        assert (await browser.get("/v1/nodes", headers=headers)).status_code == 200, "it would change nothing"
        assert (await browser.request("DELETE", "/v1/browser-sessions", headers=OWN)).json() == {"ended": 1}


async def test_a_session_may_do_what_the_token_may(site: Site) -> None:
    for scope, status in ((Scope.READ, 403), (Scope.OPERATE, 422)):
        async with site.browser() as browser:
            await browser.get(await site.link(bearer(site.gateway.settings, scope)))
            answer = await browser.post("/v1/plan/solve", json={}, headers=OWN)
            assert answer.status_code == 422, "what all may do"
            answer = await browser.post("/v1/nodes/n0/drain", json={"timeout_s": "x"}, headers=OWN)
            assert answer.status_code == status


async def test_a_session_can_say_whose_it_is(site: Site) -> None:
    headers = {
        "Authorization": f"Bearer {tokens.add(site.gateway.settings.token_file, 'alice', Scope.SUBMIT, utc_now())}"
    }
    alice = {"name": "token/alice", "scope": "submit"}
    assert (await site.client.get("/v1/actor", headers=headers)).json() == alice
    async with site.browser() as browser:
        refused(await browser.get("/v1/actor"), 401, "unauthenticated")
        await browser.get(await site.link(headers))
        assert (await browser.get("/v1/actor")).json() == alice


async def test_a_session_ends_with_its_token(site: Site) -> None:
    path = site.gateway.settings.token_file
    headers = {"Authorization": f"Bearer {tokens.add(path, 'alice', Scope.READ, utc_now())}"}
    async with site.browser() as browser:
        await browser.get(await site.link(headers))
        assert (await browser.get("/v1/nodes")).status_code == 200
        tokens.remove(path, "alice")
        tokens.add(path, "alice", Scope.OPERATE, utc_now())
        refused(await browser.get("/v1/nodes"), 401, "unauthenticated")


async def test_a_session_makes_no_links(site: Site) -> None:
    async with site.browser() as browser:
        await browser.get(await site.link())
        refused(await browser.post("/v1/browser-links", headers=OWN), 403, "forbidden")


async def test_sessions_are_ended_by_whose_they_are_and_by_operators(site: Site) -> None:
    alice, bob = (bearer(site.gateway.settings, Scope.SUBMIT) for _ in range(2))
    async with site.browser() as of_alice, site.browser() as of_bob:
        await of_alice.get(await site.link(alice))
        await of_bob.get(await site.link(bob))
        pending = await site.link(alice)
        refused(
            await site.client.request("DELETE", "/v1/browser-sessions?everybody=true", headers=alice), 403, "forbidden"
        )
        assert (await site.client.request("DELETE", "/v1/browser-sessions", headers=alice)).json() == {"ended": 1}
        refused(await of_alice.get("/v1/nodes"), 401, "unauthenticated")
        refused(await of_alice.get(pending), 404, "not-found")
        assert (await of_bob.get("/v1/nodes")).status_code == 200
        assert (await site.client.request("DELETE", "/v1/browser-sessions?everybody=true")).json() == {"ended": 1}
        refused(await of_bob.get("/v1/nodes"), 401, "unauthenticated")


async def test_head_and_options_use_no_link_up(site: Site) -> None:
    path = await site.link()
    async with site.browser() as browser:
        head = await browser.head(path)
        assert (head.status_code, head.content, "set-cookie" in head.headers) == (200, b"", False)
        assert (await browser.head(f"{path}x")).status_code == 404
        options = await browser.options(path)
        assert (options.status_code, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
        assert (await browser.get(path)).status_code == 200


async def test_links_are_counted_by_address(tmp_path: Path) -> None:
    with offline_gateway(tmp_path) as gateway:
        gateway.settings = Settings(run_dir=tmp_path, requests_per_s=1.0)
        async with client_of(gateway) as client:
            statuses = {(await client.get("/open/x")).status_code for _ in range(20)}
            assert statuses == {404, 429}


async def test_sessions_outlive_the_process_and_the_file_has_digests_only(site: Site, tmp_path: Path) -> None:
    path = await site.link()
    async with site.browser() as browser:
        cookie = cookie_in(await browser.get(path)).value
        file = tmp_path / "browser-sessions.json"
        assert file.stat().st_mode & 0o777 == 0o600
        assert cookie not in file.read_text()
        assert hashlib.sha256(cookie.encode()).hexdigest() in file.read_text()
        site.start_again(BrowserSessions(file, site.clock))
        async with site.browser() as same:
            same.cookies = browser.cookies
            assert (await same.get("/v1/nodes")).status_code == 200
        site.clock.pass_s(SESSION_S)
        assert BrowserSessions(file, site.clock).find(cookie) is None


def test_a_damaged_file_has_no_sessions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "browser-sessions.json"
    file.write_text("[{")
    assert BrowserSessions(file).find("") is None
    assert "browsers need another link" in caplog.text


async def test_a_session_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sessions = BrowserSessions(tmp_path / "file" / "sessions.json")
    code, _ = sessions.link(Bearer(name="uid/0", scope=Scope.READ))
    with pytest.raises(Unavailable):
        await sessions.open(code)
    assert not sessions._sessions
    with pytest.raises(NotFound):
        await sessions.open(code)


async def test_one_actor_has_so_many_links_and_sessions_and_takes_nobody_s(tmp_path: Path) -> None:
    sessions = BrowserSessions(tmp_path / "sessions.json")
    alice, bob = (Bearer(name=name, scope=Scope.READ) for name in ("token/alice", "token/bob"))
    of_bob, _ = sessions.link(bob)
    first, *others = (sessions.link(alice)[0] for _ in range(MOST_OF_ONE + 1))
    with pytest.raises(NotFound):
        sessions.check(first)
    cookies = [await sessions.open(code) for code in others]
    code, _ = sessions.link(alice)
    assert sessions.find(await sessions.open(code)) == alice
    assert [sessions.find(cookie) for cookie in cookies] == [None, *[alice] * (MOST_OF_ONE - 1)]
    assert sessions.find(await sessions.open(of_bob)) == bob


async def test_the_log_names_whose_session_it_was(api: Server, settings: Settings) -> None:
    token = tokens.add(settings.token_file, "alice", Scope.SUBMIT, utc_now())
    asked = await api.http.post("/v1/browser-links", headers={"Authorization": f"Bearer {token}"})
    async with httpx.AsyncClient(base_url=api.url, timeout=40) as browser:
        await browser.get(asked.json()["path"])
        # Without the session it would be the server's own user: a session counts before that.
        made = await browser.post("/v1/tasks", json=api.spec(), headers={"Origin": api.url})
        assert (made.status_code, made.json()["owner"]) == (201, "token/alice")
        refused(await browser.post("/v1/nodes/n0/cordon", json={}, headers={"Origin": api.url}), 403, "forbidden")
    [event] = [r.event for r in api.journal.log.read() if isinstance(r.event, TaskSubmitted)]
    assert event.actor == "token/alice"
