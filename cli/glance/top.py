"""``unicron top``: the cluster, its tasks, open incidents and last plans, live in the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import Format, Output, Server, connected
from cli.output import console, print_json

if TYPE_CHECKING:
    from cli.glance.top_look import Look
    from unicron_client.resources import Client

_QUIT = frozenset({b"q", b"Q"})


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame, and end.")] = False,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.2, max=3600, help="Time between two looks at the server.")
    ] = 1.0,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Watch the cluster: workers, WAF, tasks, open incidents and the last plans; q ends.

    Ctrl-C ends, too. In use: workers with a task; lost: those of lost or isolated nodes. ETA: how long a task still
    trains if its steps take as long as of late. Ids are cut: other verbs take the beginning of an id. Where the output
    is no terminal, one frame is printed with all rows.
    """
    from cli.glance.top_look import look

    with connected(server) as client:
        if output is Format.JSON:
            print_json(vars(look(client)))
        elif once or not sys.stdout.isatty():
            _print(look(client), wide=output is Format.WIDE)
        else:
            _watch(client, every)


def _print(seen: Look, *, wide: bool) -> None:
    from cli.glance.top_frame import frame

    target = console(wide=wide)
    # One that is only as wide as its lines has no height either.
    for line in frame(seen, target.width, target.height if sys.stdout.isatty() else None):
        print(line.plain)


def _watch(client: Client, every_s: float) -> None:
    """Show frames until a key or Ctrl-C ends them. While the server does not answer, the last frame stays."""
    from rich.live import Live
    from rich.text import Text

    from cli.glance.top_frame import frame
    from cli.glance.top_look import look
    from shared.errors import Unavailable

    target = console()
    seen, answered_s, notice = look(client), time.monotonic(), ""
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as keys,
        Live(console=target, screen=True, auto_refresh=False) as screen,
    ):
        while True:
            lines = frame(seen, target.width, target.height, notice)
            screen.update(Text("\n", no_wrap=True, overflow="crop").join(lines), refresh=True)
            if _quits(keys, every_s):
                return
            try:
                seen, answered_s, notice = look(client), time.monotonic(), ""
            except Unavailable as err:
                notice = f"no answer for {time.monotonic() - answered_s:.0f} s: {err.detail}"


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Have the terminal give keys as they are pressed; gives its descriptor, None where the input is no terminal."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor, termios.TCSANOW)  # Ctrl-C stays a signal
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _quits(keys: int | None, limit_s: float) -> bool:
    """Wait for a time; return at once, with True, if somebody quits."""
    if keys is None:
        time.sleep(limit_s)
        return False
    deadline_s = time.monotonic() + limit_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        ready, _, _ = select.select([keys], [], [], left_s)
        if ready and ((pressed := os.read(keys, 1)) in _QUIT or not pressed):
            return True
    return False
