"""Who sends a request, and what they may do.

Over loopback the gateway knows the user at the other end (``services.api.socket_owners``): its own user and root may do
everything and need no token. Everybody else needs one (``shared.tokens``), in the header ``Authorization: Bearer``.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from starlette import types
from starlette.datastructures import Headers

from services.api.problems import RETRY_AFTER_S, TEMPORARY, problem_response
from services.api.request_rates import RequestRates, peer_of
from services.api.socket_owners import end, uid_of
from shared import tokens
from shared.errors import Forbidden, Unauthenticated, UnicronError
from shared.tokens import Scope, Token

OPEN = frozenset({"/healthz", "/readyz"})
"""Paths for probes, which have no credentials."""

ROOT_UID = 0


@dataclass(frozen=True)
class Actor:
    """Who sends a request. ``name``: as the log and tasks have it, ``uid/<uid>`` or ``token/<name>``."""

    name: str
    scope: Scope

    def require(self, scope: Scope) -> None:
        """Refuse what the actor may not do.

        Raises:
            Forbidden: the actor's scope does not include this one.
        """
        if not self.scope.includes(scope):
            raise Forbidden(f"{self.name} has the scope {self.scope.value!r}; this needs {scope.value!r}")

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
        try:
            status = self._path.stat()
            now = (status.st_mtime_ns, status.st_ino)
        except FileNotFoundError:
            now = None
        if now != self._seen:
            self._tokens = tokens.read(self._path)
            self._seen = now
        return tokens.find(self._tokens, given)


class Access:
    """ASGI middleware that finds out who sends a request, for ``Who``; refuses it where nothing says that.

    Args:
        app: what answers.
        token_file: where tokens are.
        requests_per_s: of one peer, in the long run; 0: any number.
    """

    def __init__(self, app: types.ASGIApp, token_file: Path, requests_per_s: float = 0.0) -> None:
        self._app, self._tokens = app, TokenFile(token_file)
        self._rates = RequestRates(requests_per_s)

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Pass the request on with its actor, or refuse it."""
        if scope["type"] == "http" and scope["path"] not in OPEN:
            try:
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
        at_s = time.monotonic()
        try:
            actor = self._actor(scope)
        except UnicronError:
            client = scope.get("client")
            self._rates.admit(peer_of(client[0]) if client is not None else "", at_s)
            raise
        self._rates.admit(actor.name, at_s)
        return actor

    def _actor(self, scope: types.Scope) -> Actor:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if given:
            token = self._tokens.find(given.strip()) if scheme.lower() == "bearer" else None
            if token is None:
                raise Unauthenticated("the token is not known; `unicron token list` shows those that are")
            return Actor(f"token/{token.name}", token.scope)
        uid = _uid(scope)
        if uid in (os.getuid(), ROOT_UID):
            return Actor(f"uid/{uid}", Scope.OPERATE)
        who = "requests from other machines" if uid is None else f"requests of uid {uid}"
        raise Unauthenticated(f"{who} need a token: `unicron token add NAME` makes one, UNICRON_TOKEN has it sent")


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


Submitter = Annotated[Actor, Depends(_submits)]
"""The same, of an endpoint that changes what belongs to the actor."""
Operator = Annotated[Actor, Depends(_operates)]
"""The same, of an endpoint that changes what belongs to all."""
