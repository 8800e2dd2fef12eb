"""The loop of all watchers: look, report what is found, and look again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from cli.options import connected
from cli.output import print_json
from cli.watch.trouble import Trouble
from shared.errors import Forbidden, NotFound, UnicronError
from shared.model import utc_now
from unicron_client.resources import Client


def watch(
    server: str | None, look: Callable[[], Sequence[Trouble]], *, every_s: float, once: bool, as_json: bool
) -> None:
    """Report what ``look`` finds, again and again; what goes wrong is said, and tried again.

    Args:
        server: the server's address; None: the usual one.
        look: returns the present troubles, or raises an ``UnicronError``.
        every_s: seconds between two looks.
        once: whether to look once only, and to raise what goes wrong.
        as_json: whether the answers are printed as JSON.
    """
    with connected(server) as client:
        said: dict[tuple[str, str], str] = {}
        while True:
            try:
                _report(client, look(), said, once=once, as_json=as_json)
            except UnicronError as err:
                if once:
                    raise
                _say(said, ("", "look"), err.detail, problem=True)
            if once:
                return
            time.sleep(every_s)


def _report(
    client: Client, found: Sequence[Trouble], said: dict[tuple[str, str], str], *, once: bool, as_json: bool
) -> None:
    """Report troubles. A node that the server does not know, or the token does not name, keeps no other one waiting."""
    for trouble in found:
        place = (trouble.node, trouble.key)
        try:
            answer = client.post(f"/v1/nodes/{quote(trouble.node, safe='')}/reports", trouble.body(utc_now()))
        except (NotFound, Forbidden) as err:
            if once:
                raise
            _say(said, place, err.detail, problem=True)
            continue
        text = _answered(trouble, answer)
        if as_json and said.get(place) != text:
            print_json(answer)
        _say(said, place, text, silent=as_json)


def _say(
    said: dict[tuple[str, str], str], place: tuple[str, str], text: str, *, problem: bool = False, silent: bool = False
) -> None:
    """Print what has changed since it was said last.

    Args:
        said: what was said last of each node and key; this is noted there.
        place: the node and the key.
        text: the news.
        problem: whether it goes to standard error.
        silent: whether it is only noted.
    """
    if said.get(place) != text and not silent:
        print(f"unicron: {text}" if problem else text, file=sys.stderr if problem else sys.stdout, flush=True)
    said[place] = text


def _answered(trouble: Trouble, answer: dict[str, Any]) -> str:
    reason = f" ({trouble.reason})" if trouble.reason else ""
    follows = answer["answer"] or (f"not acted on: {answer['held']}" if answer["held"] else "reported")
    return f"{trouble.node}: {trouble.severity} {trouble.key}{reason}: {follows}"
