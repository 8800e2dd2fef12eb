"""The text that Python's faulthandler writes: cut into threads, the one that matters first. Pure."""

from __future__ import annotations

from shared.events.evidence_limits import STACK_CHARACTERS

FATAL = "Fatal Python error: "
"""How the text of a fatal signal begins."""

_CURRENT = "Current thread "
_AFTER = "\nExtension modules: "
"""What follows the threads of a fatal signal, and is long."""


def of_request(text: str) -> str:
    """Return the stacks that a process wrote on request, that of the thread which wrote them first."""
    return _ordered(text.partition(FATAL)[0])


def of_fatal_signal(text: str) -> str:
    """Return the stacks that a fatal signal wrote, that of the thread which got it first; empty: there was none."""
    _, found, fatal = text.rpartition(FATAL)
    if not found:
        return ""
    reason, _, threads = fatal.partition(_AFTER)[0].partition("\n")
    return f"{FATAL}{reason}\n{_ordered(threads)}"[:STACK_CHARACTERS]


def _ordered(text: str) -> str:
    blocks = [block.strip("\n") for block in text.split("\n\n") if block.strip()]
    blocks.sort(key=lambda block: not block.startswith(_CURRENT))  # stable: the others keep their order
    return "\n\n".join(blocks)[:STACK_CHARACTERS]
