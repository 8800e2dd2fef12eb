"""The texts in reports of ranks, as signals and the log can have them."""

from __future__ import annotations

from dataclasses import replace

from shared.events.evidence_limits import DETAIL_CHARACTERS, TRACEBACK_CHARACTERS
from unicron.protocol import messages


def storable(message: messages.Raised) -> messages.Raised:
    """Return the message cut to its limits, without lone surrogates: an error quotes any text; UTF-8 has none."""
    error, parameter = encodable(message.error), encodable(message.parameter)
    detail = encodable(message.detail[:DETAIL_CHARACTERS])
    traceback = encodable(message.traceback[-TRACEBACK_CHARACTERS:])
    limit = encodable(message.limit[:DETAIL_CHARACTERS])
    difference = encodable(message.difference[:DETAIL_CHARACTERS])
    shortened = replace(message, error=error, detail=detail, traceback=traceback, parameter=parameter)
    return replace(shortened, limit=limit, difference=difference)


def encodable(text: str) -> str:
    """Return a text without lone surrogates."""
    return text.encode("utf-8", "replace").decode()
