"""Ids that a user types: the beginning of one is enough, if no other id begins with it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from shared.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from unicron_client.resources import Client

_LISTED = 10
"""Candidates that an error names."""


def full_id(client: Client, kind: str, given: str) -> str:
    """Return the id that is meant: the given one, or the only one that begins with it.

    Args:
        client: of the server that knows the ids.
        kind: ``incident`` or ``plan``.
        given: what the user typed. It is returned as it is if no id begins with it: the server then says so.

    Raises:
        InvalidInput: several ids begin with it; the error names them.
    """
    return _only(client, kind, given) or given


def _only(client: Client, kind: str, given: str) -> str | None:
    """Return the id that is meant; None: no id begins with it."""
    found = client.get("/v1/ids", {"kind": kind, "prefix": given, "limit": _LISTED})
    ids: list[str] = found["ids"]
    if not ids or given in ids:
        return given if ids else None
    if len(ids) > 1:
        more = ", ..." if found["more"] else ""
        problem = f"is the beginning of several: {', '.join(ids)}{more}"
        raise InvalidInput.of("PLAN" if kind == "plan" else "INCIDENT", given, problem)
    return ids[0]


def id_path(client: Client, kind: str, given: str) -> str:
    """Return the path of an incident or a plan in the interface, of which a user typed the id or its beginning.

    Raises:
        InvalidInput: as ``full_id``.
    """
    return _path(kind, full_id(client, kind, given))


def _path(kind: str, name: str) -> str:
    return f"/v1/{kind}s/{quote(name, safe='')}"


def postmortem_path(client: Client, given: str) -> str:
    """Return the path of the post-mortem of an incident or of a slow worker.

    Args:
        client: of the server that knows the ids.
        given: the id of one, or its beginning; or the name of a worker: of the newest time that it was slow.

    Raises:
        InvalidInput: as ``full_id``.
        NotFound: the worker was never slow.
    """
    if "/" in given:
        found = client.pages("/v1/slow-workers", {"order": "newest"})["items"]
        newest = next((slow["id"] for slow in found if slow["worker"] == given), None)
        if newest is None:
            raise NotFound(f"worker {given!r} was never slow")
        return f"{_path('slow-worker', newest)}/postmortem"
    for kind in ("incident", "slow-worker"):
        if (meant := _only(client, kind, given)) is not None:
            return f"{_path(kind, meant)}/postmortem"
    return f"{_path('incident', given)}/postmortem"  # the server says that there is none
