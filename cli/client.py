"""REST client of the verbs: problem documents become the exceptions (and exit codes) of ``shared.errors``.

``Client`` sends single requests. ``cli/waiting.py`` has the client that waits for conditions, made from the same parts.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from shared.errors import Conflict, InvalidInput, NotFound, Unavailable, UnicronError
from shared.settings import Settings

TIMEOUT_S = 20.0
"""An answer takes milliseconds; a submission waits up to 5 s for nodes, and on a busy disk 10 s for the projections."""

PAGE_ITEMS = 1000
"""Items of one page: the most that the server returns."""

Params = Mapping[str, str | int | bool | list[str] | None]


class Client:
    """The server's interface, one request at a time.

    Args:
        server: the server's address; None: the default port on this machine.

    Raises:
        InvalidInput: the address is not an HTTP address.
    """

    def __init__(self, server: str | None = None) -> None:
        url = address(server)
        self.server = str(url)
        # No proxy of the environment: proxies are for web sites, and the cluster is near.
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False, **credentials())

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self._http.close()

    def get(self, path: str, params: Params | None = None) -> Any:
        """Return the JSON at ``path``."""
        return self._request("GET", path, params=given(params))

    def text(self, path: str, params: Params | None = None) -> str:
        """Return the text at ``path``."""
        with transport_errors(self.server):
            response = self._http.get(path, params=given(params))
        raise_problem(response)
        return response.text

    def post(self, path: str, body: Any = None, *, read_timeout_s: float = TIMEOUT_S) -> Any:
        """Send ``body`` and return the answer, which may take ``read_timeout_s``."""
        timeout = httpx.Timeout(TIMEOUT_S, read=read_timeout_s)
        return self._request("POST", path, json=body, timeout=timeout)

    def patch(self, path: str, body: Any) -> Any:
        """Change what is at ``path`` by a JSON merge patch, and return the answer."""
        return self._request("PATCH", path, json=body)

    def delete(self, path: str, params: Params | None = None) -> Any:
        """Delete what is at ``path``, and return the answer."""
        return self._request("DELETE", path, params=given(params))

    def pages(self, path: str, params: Params | None = None) -> dict[str, Any]:
        """Return a whole list in the form of one page."""
        items: list[Any] = []
        cursor: str | None = None
        while True:
            page = self.get(path, {**(params or {}), "limit": PAGE_ITEMS, "cursor": cursor})
            items += page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return {"items": items, "next_cursor": None}

    @contextlib.contextmanager
    def lines(self, path: str, params: Params | None = None, *, accept: str) -> Iterator[Iterator[str]]:
        """Open a stream that may never end; give its lines."""
        with (
            transport_errors(self.server),
            self._http.stream(
                "GET",
                path,
                params=given(params),
                headers={"Accept": accept},
                timeout=httpx.Timeout(TIMEOUT_S, read=None),
            ) as response,
        ):
            if response.is_error:
                response.read()
            raise_problem(response)
            yield response.iter_lines()

    @contextlib.contextmanager
    def body(self, path: str, headers: Mapping[str, str], *, read_timeout_s: float) -> Iterator[httpx.Response]:
        """Open a download; give the response, whose body is not read yet."""
        timeout = httpx.Timeout(TIMEOUT_S, read=read_timeout_s)
        with (
            transport_errors(self.server),
            self._http.stream("GET", path, headers=dict(headers), timeout=timeout) as response,
        ):
            if response.is_error:
                response.read()
            raise_problem(response)
            yield response

    def _request(self, method: str, path: str, **arguments: Any) -> Any:
        with transport_errors(self.server):
            response = self._http.request(method, path, **arguments)
        return content(response)


def address(server: str | None) -> httpx.URL:
    """Return the address of a server; None: the default port on this machine.

    Raises:
        InvalidInput: it is not an HTTP address.
    """
    text: str = server or Settings.model_fields["server"].default
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as err:
        raise InvalidInput(f"--server: {text!r} is not an address: {err}") from err
    if url.scheme not in {"http", "https"} or not url.host:
        raise InvalidInput(f"--server: {text!r} must be like http://HOST:PORT")
    return url


def credentials() -> dict[str, Any]:
    """Return what an HTTP client needs besides the address: the token that it sends, and whose certificates it trusts.

    Raises:
        InvalidInput: the file of certificates cannot be used.
    """
    arguments: dict[str, Any] = {}
    if token := os.environ.get("UNICRON_TOKEN"):
        arguments["headers"] = {"Authorization": f"Bearer {token}"}
    if path := os.environ.get("UNICRON_CA_FILE"):
        try:
            arguments["verify"] = ssl.create_default_context(cafile=path)
        except OSError as err:
            raise InvalidInput(f"UNICRON_CA_FILE: {path}: {err.strerror or err}") from err
    return arguments


@contextlib.contextmanager
def transport_errors(server: str) -> Iterator[None]:
    """Raise what goes wrong on the way to the server as ``Unavailable``."""
    try:
        yield
    except httpx.TimeoutException as err:
        raise Unavailable(f"{server} does not answer: {type(err).__name__}") from err
    except httpx.TransportError as err:
        raise Unavailable(
            f"cannot reach a server at {server} ({err}); start one with `unicron up`, "
            "or name it with --server or UNICRON_SERVER"
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
