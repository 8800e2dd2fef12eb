"""Who sends a request, and what they may do.

Over loopback the gateway knows the user at the other end (``services.api.access.socket_owners``): its own user and root
may do everything and need no token. Everybody else needs one (``shared.service.tokens``), in the header
``Authorization: Bearer``; a browser has the cookie of a session instead (``services.api.access.browser_sessions``).
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from starlette import types
from starlette.datastructures import Headers

from services.api.access.browser_sessions import Bearer, BrowserSessions, cookie_of
from services.api.access.request_rates import RequestRates, peer_of
from services.api.access.socket_owners import end, uid_of
from services.api.http.http_policy import CrossOrigin
from services.api.http.methods import CHANGES
from services.api.http.problems import RETRY_AFTER_S, TEMPORARY, problem_response
from shared.errors import Forbidden, Unauthenticated, UnicronError
from shared.service import tokens
from shared.service.tokens import Scope, Token

OPEN = frozenset({"/healthz", "/readyz"})
"""Paths for probes, which have no credentials."""

PAGE = "/page/"
"""What the paths of the live page's files begin with (``services.api.routers.page``). They are the same for everybody;
what they show is asked for with credentials."""

TASK_PAGE = "/tasks/"
"""What the paths of the pages of tasks begin with: the same document as ``/``, whatever the rest is."""

LINKS = "/open/"
"""What the paths of links begin with, whose credential is the rest of the path (``services.api.routers.browser``)."""

REPORTS = r"/v1/nodes/[^/]+/reports"
"""The paths to which monitors send reports."""

OWN_RIGHTS = "/v1/actor"
"""The path that says who asks and what they may do."""

ROOT_UID = 0


@dataclass(frozen=True)
class Actor:
    """Who sends a request.

    Attributes:
        name: as the log and tasks have it, ``uid/<uid>`` or ``token/<name>``.
        scope: what they may do.
        token_sha256: of the token, with one.
        in_session: whether a browser's session says so.
        nodes: of which a bearer of the scope ``report`` may report (``Token.nodes``).
    """

    name: str
    scope: Scope
    token_sha256: str = ""
    in_session: bool = False
    nodes: tuple[str, ...] = ()

    @property
    def bearer(self) -> Bearer:
        """The same, for links and sessions."""
        return Bearer(name=self.name, scope=self.scope, token_sha256=self.token_sha256)

    def require(self, scope: Scope) -> None:
        """Refuse what the actor may not do.

        Raises:
            Forbidden: the actor's scope does not include this one.
        """
        if not self.scope.includes(scope):
            raise Forbidden(f"{self.name} has the scope {self.scope.value!r}; this needs {scope.value!r}")

    def require_to_report(self, node: str) -> None:
        """Refuse a report of a node that the actor's token does not name.

        Raises:
            Forbidden: it does not, or its scope does not include reports.
        """
        self.require(Scope.REPORT)
        if self.scope is Scope.REPORT and not any(fnmatchcase(node, pattern) for pattern in self.nodes):
            raise Forbidden(f"{self.name} may report of {', '.join(self.nodes) or 'no node'}, and not of {node!r}")

    def require_to_read_output(self, owner: str, task: str) -> None:
        """Refuse what a task has printed, which may say anything, to all but its owner and operators.

        Raises:
            Forbidden: the task is not the actor's, and the actor may not operate.
        """
        if owner != self.name and not self.scope.includes(Scope.OPERATE):
            whose = owner or "nobody"
            raise Forbidden(f"task {task!r} belongs to {whose}; its output is for them, and for the scope 'operate'")

    def require_own(self, owner: str, what: str) -> None:
        """Refuse a change of what belongs to somebody else.

        Args:
            owner: an actor's name; empty: of a task from before there were owners.
            what: is to be changed, in words.

        Raises:
            Forbidden: it is not the actor's, and the actor may not operate.
        """
        self.require(Scope.SUBMIT)
        if owner != self.name and not self.scope.includes(Scope.OPERATE):
            raise Forbidden(f"{what} belongs to {owner or 'nobody'}; {self.name} may change their own only")


class TokenFile:
    """The tokens in a file, read again when the file has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._tokens: list[Token] = []

    def find(self, given: str) -> Token | None:
        """Return the token whose text is given; None: there is none.

        Raises:
            Corrupt, Unavailable: the file cannot be used; then nobody is let in by a token.
        """
        return tokens.find(self._present(), given)

    def by_digest(self, sha256: str) -> Token | None:
        """Return the token with this digest; None: there is none any more.

        Raises:
            Corrupt, Unavailable: as ``find``.
        """
        return next((token for token in self._present() if token.sha256 == sha256), None)

    def _present(self) -> list[Token]:
        try:
            status = self._path.stat()
            now = (status.st_mtime_ns, status.st_ino)
        except FileNotFoundError:
            now = None
        if now != self._seen:
            self._tokens = tokens.read(self._path)
            self._seen = now
        return self._tokens


class Access:
    """ASGI middleware that finds out who sends a request, for ``Who``; refuses it where nothing says that.

    Args:
        app: what answers.
        token_file: where tokens are.
        sessions: of browsers.
        requests_per_s: of one peer, in the long run; 0: any number.
    """

    def __init__(
        self, app: types.ASGIApp, token_file: Path, sessions: BrowserSessions, requests_per_s: float = 0.0
    ) -> None:
        self._app, self._tokens, self._sessions = app, TokenFile(token_file), sessions
        self._rates = RequestRates(requests_per_s)

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Pass the request on with its actor, or refuse it."""
        if scope["type"] == "http" and scope["path"] not in OPEN:
            try:
                if scope["path"] == "/" or scope["path"].startswith((PAGE, TASK_PAGE, LINKS)):
                    self._count(scope)
                else:
                    scope.setdefault("state", {})["actor"] = self._admitted(scope)
            except UnicronError as err:
                headers = {"WWW-Authenticate": "Bearer"} if err.status == Unauthenticated.status else {}
                if err.status in TEMPORARY:
                    headers = {"Retry-After": str(RETRY_AFTER_S)}
                await problem_response(err.problem(), headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admitted(self, scope: types.Scope) -> Actor:
        """Return the actor, whose request is counted; those of nobody are counted by their address."""
        try:
            actor = self._actor(scope)
        except UnicronError:
            self._count(scope)
            raise
        self._rates.admit(actor.name, time.monotonic())
        if actor.scope is Scope.REPORT and not _is_report(scope["path"]):
            raise Forbidden(f"{actor.name} has the scope 'report', which allows reports of nodes and nothing else")
        return actor

    def _count(self, scope: types.Scope) -> None:
        """Count a request of nobody by its address."""
        client = scope.get("client")
        self._rates.admit(peer_of(client[0]) if client is not None else "", time.monotonic())

    def _actor(self, scope: types.Scope) -> Actor:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if given:
            token = self._tokens.find(given.strip()) if scheme.lower() == "bearer" else None
            if token is None:
                raise Unauthenticated("the token is not known; `unicron token list` shows those that are")
            return _bearer_of(token)
        cookie = cookie_of(scope)
        if cookie and (actor := self._in_session(cookie)) is not None:
            _check_own_page(scope)
            return actor
        uid = _uid(scope)
        if uid in (os.getuid(), ROOT_UID):
            return Actor(f"uid/{uid}", Scope.OPERATE)
        if cookie:
            raise Unauthenticated("the browser's session has ended: `unicron open` makes a link to another one")
        who = "requests from other machines" if uid is None else f"requests of uid {uid}"
        raise Unauthenticated(f"{who} need a token: `unicron token add NAME` makes one, UNICRON_TOKEN has it sent")

    def _in_session(self, cookie: str) -> Actor | None:
        """Return whose session a cookie has; None: it has ended, or the token that it came from is not there."""
        bearer = self._sessions.find(cookie)
        if bearer is None:
            return None
        if not bearer.token_sha256:
            return Actor(bearer.name, bearer.scope, in_session=True)
        token = self._tokens.by_digest(bearer.token_sha256)
        return None if token is None else _bearer_of(token, in_session=True)


def _bearer_of(token: Token, *, in_session: bool = False) -> Actor:
    return Actor(f"token/{token.name}", token.scope, token.sha256, in_session, tuple(token.nodes))


def _is_report(path: str) -> bool:
    """Return whether a path is one of those that the scope ``report`` allows."""
    return path == OWN_RIGHTS or re.fullmatch(REPORTS, path) is not None


def _check_own_page(scope: types.Scope) -> None:
    """Refuse a change that a browser sends without saying from which page; ``HttpPolicy`` has refused other sites'.

    Raises:
        CrossOrigin: there is no ``Origin``, which browsers send with every change.
    """
    if scope["method"] in CHANGES and "origin" not in Headers(scope=scope):
        raise CrossOrigin("a change in a browser's session needs the header Origin, which browsers send")


def _uid(scope: types.Scope) -> int | None:
    """Return the uid of whoever sends a request over loopback; None: it comes from elsewhere."""
    client, server = scope.get("client"), scope.get("server")
    if client is None or server is None or server[1] is None:
        return None
    peer, own = end(client[0], client[1]), end(server[0], server[1])
    return uid_of(peer, own) if peer is not None and own is not None else None


async def actor_of(request: Request) -> Actor:
    """Return who sends a request (FastAPI dependency)."""
    actor = request.state.actor
    assert isinstance(actor, Actor)
    return actor


Who = Annotated[Actor, Depends(actor_of)]
"""Type of the parameter by which an endpoint gets who sends the request: anybody who may read."""


async def _submits(who: Who) -> Actor:
    who.require(Scope.SUBMIT)
    return who


async def _operates(who: Who) -> Actor:
    who.require(Scope.OPERATE)
    return who


async def _reports(who: Who) -> Actor:
    who.require(Scope.REPORT)
    return who


Submitter = Annotated[Actor, Depends(_submits)]
"""The actor of an endpoint that changes what belongs to the actor."""
Operator = Annotated[Actor, Depends(_operates)]
"""The actor of an endpoint that changes what belongs to all."""
Reporter = Annotated[Actor, Depends(_reports)]
"""The actor of an endpoint that reports troubles; of which nodes is asked by ``Actor.require_to_report``."""
