"""Single requests to the gateway, with JSON as it comes: the part of ``Client`` that knows no resource."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx

from unicron_client.transport import (
    PAGE_ITEMS,
    TIMEOUT_S,
    Params,
    address,
    content,
    credentials,
    given,
    raise_problem,
    transport_errors,
)


class Answer(NamedTuple):
    """An answer that is no error: its HTTP status and its JSON."""

    status: int
    content: Any


class Connection:
    """The server's interface, one request at a time.

    Args:
        server: the server's address; None: that of ``UNICRON_SERVER``, or else the default port on this machine.
        token: with which the user may use the server; None: that of ``UNICRON_TOKEN``, if there is one.
        timeout_s: longest time for a connection, and between two parts of an answer.

    Raises:
        InvalidInput: the address is not an HTTP address.
    """

    def __init__(self, server: str | None = None, token: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        url = address(server)
        self.server = str(url)
        # No proxy of the environment: proxies are for web sites, and the cluster is near.
        self._http = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False, **credentials(url, token))

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()

    def close(self) -> None:
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

    def request(self, method: str, path: str, body: Any = None, *, params: Params | None = None) -> Any:
        """Send ``body`` by any method of HTTP, and return the answer."""
        return self._request(method, path, json=body, params=given(params))

    def pages(self, path: str, params: Params | None = None, *, most: int | None = None) -> dict[str, Any]:
        """Return a whole list in the form of one page, or the first items of it, ``most`` at most."""
        return {"items": [*self.items(path, params, most=most)], "next_cursor": None}

    def items(self, path: str, params: Params | None = None, *, most: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the items of a list as JSON, from page to page, ``most`` at most; None: all."""
        cursor: str | None = None
        while most is None or most > 0:
            limit = PAGE_ITEMS if most is None else min(most, PAGE_ITEMS)
            page = self.get(path, {**(params or {}), "limit": limit, "cursor": cursor})
            yield from page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return
            most = most if most is None else most - len(page["items"])

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

    def answer(self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None) -> Answer:
        """Send ``body`` with these headers; return the answer with its status, which tells what has become of it."""
        with transport_errors(self.server):
            response = self._http.request(method, path, json=body, headers=headers)
        return Answer(response.status_code, content(response))

    def send(self, path: str, body: bytes, kind: str) -> Any:
        """Send bytes of a media type to ``path``, and return the answer."""
        return self._request("PUT", path, content=body, headers={"Content-Type": kind})

    def _request(self, method: str, path: str, **arguments: Any) -> Any:
        with transport_errors(self.server):
            response = self._http.request(method, path, **arguments)
        return content(response)
