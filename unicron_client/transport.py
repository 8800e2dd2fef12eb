"""What every HTTP client of the gateway does alike: address, credentials, and errors.

Problem documents become the exceptions (and exit codes) of ``shared.errors``.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from shared.errors import AnswerLost, Conflict, InvalidInput, NotFound, Unavailable, UnicronError
from shared.settings.endpoints import DEFAULT_SERVER

TIMEOUT_S = 20.0
"""An answer takes milliseconds; a submission waits up to 5 s for nodes, and on a busy disk 10 s for the projections."""

PAGE_ITEMS = 1000
"""Items of one page: the most that the server returns."""

Params = Mapping[str, str | int | bool | list[str] | None]
"""Parameters of a request; those that are None are not sent."""


def address(server: str | None) -> httpx.URL:
    """Return the address of a server; None: that of ``UNICRON_SERVER``, or else the default port on this machine.

    Raises:
        InvalidInput: it is not an HTTP address.
    """
    text = server or os.environ.get("UNICRON_SERVER") or DEFAULT_SERVER
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as err:
        raise InvalidInput(f"--server: {text!r} is not an address: {err}") from err
    if url.scheme not in {"http", "https"} or not url.host:
        raise InvalidInput(f"--server: {text!r} must be like http://HOST:PORT")
    return url


def credentials(url: httpx.URL, token: str | None = None) -> dict[str, Any]:
    """Return what an HTTP client needs besides the address: the token that it sends, and whose certificates it trusts.

    Args:
        url: the address.
        token: of the user; None: that of ``UNICRON_TOKEN``, if there is one.

    Raises:
        InvalidInput: the file of certificates cannot be used.
    """
    arguments: dict[str, Any] = {}
    if token := token or os.environ.get("UNICRON_TOKEN"):
        arguments["headers"] = {"Authorization": f"Bearer {token}"}
    if url.scheme == "http":
        # Trusts nobody, and is not used. httpx would read the certificates of the system, in 20 ms.
        arguments["verify"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    elif path := os.environ.get("UNICRON_CA_FILE"):
        try:
            arguments["verify"] = ssl.create_default_context(cafile=path)
        except OSError as err:
            raise InvalidInput(f"UNICRON_CA_FILE: {path}: {err.strerror or err}") from err
    return arguments


@contextlib.contextmanager
def transport_errors(server: str) -> Iterator[None]:
    """Raise what goes wrong on the way to the server as ``Unavailable``, or ``AnswerLost`` if it may have got there."""
    try:
        yield
    except (httpx.ReadTimeout, httpx.ReadError, httpx.RemoteProtocolError) as err:
        if err.request.method == "GET":
            raise Unavailable(f"{server} does not answer: {type(err).__name__}") from err
        raise AnswerLost(
            f"{server} did not answer ({type(err).__name__}): the request may be recorded; look before it is sent again"
        ) from err
    except httpx.TimeoutException as err:
        raise Unavailable(f"{server} does not answer: {type(err).__name__}") from err
    except httpx.TransportError as err:
        raise Unavailable(
            f"cannot reach a server at {server} ({err}); start one with `unicron up`, "
            "or name it with --server or UNICRON_SERVER",
            server=server,
        ) from err


def raise_problem(response: httpx.Response) -> None:
    """Raise the error that a response contains, if it contains one."""
    if response.is_error:
        raise problem_error(response)


def content(response: httpx.Response) -> Any:
    """Return the JSON of a response.

    Raises:
        UnicronError: the response is an error.
        Unavailable: the response is no JSON, so the server is another program.
    """
    raise_problem(response)
    try:
        return response.json()
    except ValueError as err:
        raise Unavailable(f"{response.request.url} does not speak Unicron's interface: not JSON") from err


def given(params: Params | None) -> dict[str, Any]:
    """Return the parameters that have a value."""
    return {name: value for name, value in (params or {}).items() if value is not None}


def problem_error(response: httpx.Response) -> UnicronError:
    """Return the problem document of a response as the exception of its code, or else of its HTTP status."""
    try:
        problem = response.json()
        code, detail = str(problem["code"]), str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        return Unavailable(f"{response.request.url} answered {response.status_code} without a problem document")
    kind = _by_code(UnicronError, code) or _by_status(response.status_code)
    error = kind(detail)
    known = {"type", "title", "status", "code", "detail"}
    error.extra = {name: value for name, value in problem.items() if name not in known}
    return error


def _by_code(kind: type[UnicronError], code: str) -> type[UnicronError] | None:
    if kind.code == code:
        return kind
    found = (_by_code(child, code) for child in kind.__subclasses__())
    return next((child for child in found if child is not None), None)


def _by_status(status: int) -> type[UnicronError]:
    kinds: dict[int, type[UnicronError]] = {404: NotFound, 409: Conflict, 429: Unavailable, 503: Unavailable}
    return kinds.get(status, InvalidInput if status < 500 else UnicronError)
