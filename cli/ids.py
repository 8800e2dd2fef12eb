"""Ids that a user types: the beginning of one is enough, if no other id begins with it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from shared.errors import InvalidInput

if TYPE_CHECKING:
    from cli.client import Client

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
    found = client.get("/v1/ids", {"kind": kind, "prefix": given, "limit": _LISTED})
    ids: list[str] = found["ids"]
    if not ids or given in ids:
        return given
    if len(ids) > 1:
        more = ", ..." if found["more"] else ""
        problem = f"is the beginning of several: {', '.join(ids)}{more}"
        field = kind.upper()
        raise InvalidInput(f"{field}: {given!r} {problem}", [{"field": field, "value": given, "problem": problem}])
    return ids[0]


def id_path(client: Client, kind: str, given: str) -> str:
    """Return the path of an incident or a plan in the interface, of which a user typed the id or its beginning.

    Raises:
        InvalidInput: as ``full_id``.
    """
    return f"/v1/{kind}s/{quote(full_id(client, kind, given), safe='')}"
