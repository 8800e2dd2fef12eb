"""The requests that a fork server (``unicron.forkserver``) reads: one line of JSON each."""

from __future__ import annotations

import json
from typing import Any

ERROR_CHARACTERS = 1000
"""Longest error sent: a path, and what is wrong with it. The agent reads lines of up to 64 KiB."""

_TEXTS = {
    "fork": ("id", "task", "worker", "spec", "output"),
    "store": ("id", "host", "output"),
    "check": ("id", "output"),
    "acknowledge": ("id",),
}
"""The fields that each request needs."""


def read_request(line: bytes) -> dict[str, Any]:
    """Return the request in a line.

    Raises:
        ValueError: not a request, or a field that the request needs is missing or has another type.
    """
    try:
        request = json.loads(line)
    except RecursionError as err:
        raise ValueError("nested too deeply") from err
    if not isinstance(request, dict):
        raise ValueError("not a JSON object")
    do = request.get("do")
    for name in ("do", *(_TEXTS.get(do, ()) if isinstance(do, str) else ())):
        if not isinstance(request.get(name), str) or "\0" in request[name]:
            raise ValueError(f"{name} must be text without null bytes")
    stacks = request.get("stacks")
    if stacks is not None and (not isinstance(stacks, str) or "\0" in stacks):
        raise ValueError("stacks must be text without null bytes")
    uid = request.get("uid")
    if uid is not None and (type(uid) is not int or uid < 1):
        raise ValueError("uid must be the number of a user that is not root")
    env = request.get("env") or {}
    if not isinstance(env, dict) or not all(isinstance(text, str) for text in (*env, *env.values())):
        raise ValueError("env must map text to text")
    return request


def error_detail(err: Exception) -> str:
    """Return what is wrong with a request, for the event ``error``."""
    return f"{type(err).__name__}: {err}"[:ERROR_CHARACTERS]
