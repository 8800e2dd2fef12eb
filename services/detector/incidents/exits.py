"""The names of exit codes: what a process has ended with, in an incident."""

from __future__ import annotations

import signal

OWN_EXITS = {
    75: "its node agent did not come back",
    76: "its node agent does not read its protocol version",
    77: "its communicators could not be aborted in time",
}
"""What the library means by the exit codes that it ends a training process with (``unicron.link.agent_link``,
``unicron.join.groups``)."""


def exit_name(exit_code: int) -> str:
    """Return the name of an exit code: ``SIGKILL`` for -9, ``exit 1`` for 1, and with its meaning if it is our own."""
    if exit_code >= 0:
        meaning = OWN_EXITS.get(exit_code)
        return f"exit {exit_code}: {meaning}" if meaning else f"exit {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
