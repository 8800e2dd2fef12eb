"""Ranges of user ids, as the setting ``rank_uids`` names them."""

from __future__ import annotations

MAX_UID = 2**32 - 2
"""Largest user id of Linux; the next one, -1 as an unsigned number, stands for "no change"."""


def uid_range(text: str) -> range:
    """Return the user ids that a text names, ``FIRST-LAST``; none if it is empty.

    Raises:
        ValueError: not a range of user ids, or one with root's.
    """
    if not text:
        return range(0)
    first, dash, last = text.partition("-")
    allowed = f"FIRST-LAST, two user ids from 1 to {MAX_UID}, the smaller one first"
    if not dash or not all(part.isascii() and part.isdigit() and len(part) <= 10 for part in (first, last)):
        raise ValueError(f"not {allowed}")
    found = range(int(first), int(last) + 1)
    if not found or found.start < 1 or int(last) > MAX_UID:
        raise ValueError(f"not {allowed}")
    return found
