"""What every request has to satisfy before it is routed.

A web page that a user of this machine opens can send requests here from the user's browser. Two properties of a request
tell such a page from a client: the ``Host`` is a name of the page's own that resolves to this machine (DNS rebinding),
or the ``Origin`` is another site's (cross-site request forgery). A form or a script without permission can moreover
send only the content types of forms and plain text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.http.methods import CHANGES, allowed_methods, answer_head
from services.api.http.problems import problem_response
from shared.errors import InvalidInput, UnicronError
from shared.service.http_server import KnownHosts

CONTENT_TYPES = (
    "application/json", "application/yaml", "application/x-yaml", "application/merge-patch+json", "application/x-tar"
)  # fmt: skip
"""The types that bodies may have. A browser asks the server for permission before it sends one of them for another
site."""

_HEADERS = {
    # Bodies are what their type says: a browser does not run a task's output as a script.
    "X-Content-Type-Options": "nosniff",
    # No other site shows this one in a frame.
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


class WrongHost(UnicronError):
    """The request names a host that this server is not known as."""

    status = 421
    exit_code = 2


class CrossOrigin(UnicronError):
    """A page of another site asks for a change."""

    status = 403
    exit_code = 2


class UnsupportedContentType(InvalidInput):
    """A body of another content type than JSON, YAML and archives."""

    status = 415


class HttpPolicy:
    """ASGI middleware that refuses requests by their headers, and passes others on by their methods.

    Args:
        app: what answers the others.
        hosts: names that this server is known as, besides its host name, ``localhost`` and addresses: a page on another
            site cannot have an address for its own name.
        routes: of the application.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._hosts = KnownHosts(hosts)
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = _with_headers(send)
        try:
            self._check(scope)
        except UnicronError as err:
            await problem_response(err.problem())(scope, receive, send)
            return
        if scope["method"] == "OPTIONS" and (methods := allowed_methods(self._routes, scope)):
            await send({"type": "http.response.start", "status": 204, "headers": [(b"allow", methods.encode())]})
            await send({"type": "http.response.body", "body": b""})
        elif scope["method"] == "HEAD":
            await answer_head(self._app, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._check_host(headers.get("host", ""))
        if scope["method"] in CHANGES:
            _check_origin(headers, scope.get("scheme", "http"))
            _check_content_type(headers)

    def _check_host(self, given: str) -> None:
        if not self._hosts.includes(given):
            raise WrongHost(
                f"Host: {given[:200]!r} is no name of this server: use its address or "
                f"{', '.join(sorted(self._hosts.names))}, or add the name to UNICRON_ALLOWED_HOSTS"
            )


def _check_origin(headers: Headers, scheme: str) -> None:
    origin = headers.get("origin")
    own = origin is None or _is_own(origin, headers.get("host", ""), scheme)
    if not own or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise CrossOrigin(f"a page of another site ({(origin or 'not named')[:200]}) may not change anything here")


def _is_own(origin: str, host: str, scheme: str) -> bool:
    """Return whether an origin is this server's. With TLS in a proxy only the page's scheme is ``https``."""
    try:
        page = urlsplit(origin)
    except ValueError:  # brackets that do not match
        return False
    return origin != "null" and page.netloc == host and page.scheme in ("https", scheme)


def _check_content_type(headers: Headers) -> None:
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    given = headers.get("content-type", "")
    if has_body and given.partition(";")[0].strip().lower() not in CONTENT_TYPES:
        allowed = ", ".join(CONTENT_TYPES)
        problem = f"must be one of {allowed}"
        raise UnsupportedContentType(
            f"Content-Type: {given[:200]!r} {problem}",
            [{"field": "Content-Type", "value": given[:200], "problem": problem}],
        )


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message.get("headers", ())))
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            message = {**message, "headers": headers.raw}
        await send(message)

    return sending
