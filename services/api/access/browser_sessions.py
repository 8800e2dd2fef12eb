"""Sessions of browsers, which can send no token: a link that is opened once gives the browser a cookie.

``unicron open`` asks for a link. Whoever opens it within ``LINK_S`` has a session with the rights of whoever asked,
until ``SESSION_S`` have passed, the sessions are ended, or the token that asked is removed. Links are in this process's
memory; sessions also in a file, so that they outlive the process. Of both only the SHA-256 is kept: as with tokens
(``shared.service.tokens``), there is nothing to guess.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import Field, TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import Scope as ConnectionScope

from shared.errors import NotFound, Unavailable
from shared.machine.durable_files import replace_file
from shared.model import Clock, Model, utc_now
from shared.service.tokens import Scope

logger = logging.getLogger(__name__)

T = TypeVar("T")

LINK_S = 120.0
"""For how long a link may be opened: to copy it to a browser on another machine."""

SESSION_S = 12 * 3600.0
"""Length of a session: a working day."""

MOST_OF_ONE = 32
"""Links, and sessions, of one actor; another one takes the place of the oldest. A person uses a few browsers."""

SECRET_BYTES = 32
"""Random bytes of a link and of a cookie: as many as the digest has."""

COOKIE = "unicron-session"
"""What the name of the cookie has in it (``cookie_name``)."""


class Bearer(Model):
    """For whom a session is: an actor's name and scope. ``token_sha256``: of the actor's token; empty: it has none."""

    name: str
    scope: Scope
    token_sha256: str = ""


class Session(Model):
    """A session as the file has it. ``sha256``: of the cookie."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bearer: Bearer
    expires_at: datetime


class Link(Model):
    """A link that nobody has opened yet."""

    bearer: Bearer
    expires_at: datetime


_FILE: TypeAdapter[list[Session]] = TypeAdapter(list[Session])


def cookie_name(scope: ConnectionScope) -> str:
    """Return the name of the cookie for a request.

    A browser sends a cookie to all ports of a host, so the name has the port by which the browser knows this server.
    With TLS the name begins with ``__Host-``: browsers then take the cookie over TLS only, and for this host alone.
    """
    try:
        port = urlsplit(f"//{Headers(scope=scope).get('host', '')}").port
    except ValueError:  # no port number
        port = None
    name = COOKIE if port is None else f"{COOKIE}-{port}"
    return f"__Host-{name}" if scope.get("scheme") == "https" else name


def cookie_of(scope: ConnectionScope) -> str:
    """Return the session's cookie in a request; empty: there is none."""
    given = Headers(scope=scope).get("cookie", "")
    return cookie_parser(given).get(cookie_name(scope), "")


class BrowserSessions:
    """Links and sessions. Only the event loop may use it.

    Args:
        path: of the file of sessions, which need not exist. One that is not readable has no sessions: browsers ask for
            another link.
        clock: returns the time.
    """

    def __init__(self, path: Path, clock: Clock = utc_now) -> None:
        self._path, self._clock = path, clock
        self._links: dict[str, Link] = {}
        self._sessions = {session.sha256: session for session in _read(path)}
        self._one_writer = asyncio.Lock()

    def link(self, bearer: Bearer) -> tuple[str, datetime]:
        """Return the code of a new link, and until when it may be opened."""
        self._forget_expired()
        _make_room(self._links, lambda link: link.bearer.name == bearer.name)
        code, expires_at = secrets.token_urlsafe(SECRET_BYTES), self._clock() + timedelta(seconds=LINK_S)
        self._links[_digest(code)] = Link(bearer=bearer, expires_at=expires_at)
        return code, expires_at

    def check(self, code: str) -> None:
        """Refuse a code that opens nothing.

        Raises:
            NotFound: no link has it, or the link was opened or has expired.
        """
        self._forget_expired()
        if _digest(code) not in self._links:
            raise NotFound("the link was opened before, or has expired: `unicron open` makes another one")

    async def open(self, code: str) -> str:
        """Begin a session by a link, which is used up; return the text of the session's cookie.

        Raises:
            NotFound: as ``check``.
            Unavailable: the file cannot be written; the link is used up all the same.
        """
        self.check(code)
        bearer = self._links.pop(_digest(code)).bearer
        _make_room(self._sessions, lambda session: session.bearer.name == bearer.name)
        cookie = secrets.token_urlsafe(SECRET_BYTES)
        expires_at = self._clock() + timedelta(seconds=SESSION_S)
        session = Session(sha256=_digest(cookie), bearer=bearer, expires_at=expires_at)
        self._sessions[session.sha256] = session
        try:
            await self._write()
        except Unavailable:
            self._sessions.pop(session.sha256, None)
            raise
        return cookie

    def find(self, cookie: str) -> Bearer | None:
        """Return for whom a session is; None: there is no such session, or it has expired."""
        session = self._sessions.get(_digest(cookie))
        return session.bearer if session is not None and session.expires_at > self._clock() else None

    async def end(self, name: str | None) -> int:
        """End the sessions of an actor, and its links; return how many sessions there were.

        Args:
            name: of the actor; None: of all.

        Raises:
            Unavailable: the file cannot be written: after another start of this process they would be there again.
        """
        self._forget_expired()
        self._links = {key: link for key, link in self._links.items() if name not in (None, link.bearer.name)}
        kept = {key: one for key, one in self._sessions.items() if name not in (None, one.bearer.name)}
        ended, self._sessions = len(self._sessions) - len(kept), kept
        await self._write()
        return ended

    def _forget_expired(self) -> None:
        now = self._clock()
        self._links = {key: link for key, link in self._links.items() if link.expires_at > now}
        self._sessions = {key: one for key, one in self._sessions.items() if one.expires_at > now}

    async def _write(self) -> None:
        async with self._one_writer:
            data = _FILE.dump_json(list(self._sessions.values()), indent=1)
            try:
                await asyncio.to_thread(replace_file, self._path, data, mode=0o600)
            except OSError as err:
                raise Unavailable(f"{self._path}: {err.strerror or err}") from err


def _make_room(found: dict[str, T], own: Callable[[T], bool]) -> None:
    """Forget the oldest of an actor's own, if there are as many as there may be."""
    keys = [key for key, one in found.items() if own(one)]
    for key in keys[: max(0, len(keys) - MOST_OF_ONE + 1)]:
        del found[key]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _read(path: Path) -> list[Session]:
    try:
        return _FILE.validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as err:
        logger.warning("%s is not readable: browsers need another link: %s", path, type(err).__name__)
        return []
