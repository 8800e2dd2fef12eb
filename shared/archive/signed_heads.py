"""Signed heads: for each day, the hash of its last event, with a signature that takes a key.

A file of one JSON object a line. With the key and a copy of the file one can show that a log is the one that was there,
up to the last signed day (``anchors``). The signature is HMAC-SHA256 (RFC 2104), so the key both signs and verifies: it
must not be where the log's database is.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from datetime import date
from pathlib import Path

from pydantic import Field, ValidationError

from shared.errors import InvalidInput, NotFound
from shared.log.anchors import Anchor, Defect
from shared.model import Model, canonical_json

LEAST_KEY_BYTES = 16
"""Least length of a key: 128 bits, below which guessing becomes conceivable."""

_PURPOSE = "unicron log head 1"
"""Part of what is signed, so that no signature made with the same key for another purpose passes for a head's."""


class SignedHead(Model):
    """The last event of a day in UTC, by the time at which it was recorded."""

    day: date
    position: int = Field(ge=1)
    hash: str
    signature: str = ""

    def signed(self, key: bytes) -> SignedHead:
        """Return the head with its signature."""
        return self.model_copy(update={"signature": self._signature(key)})

    def is_genuine(self, key: bytes) -> bool:
        """Return whether the holder of the key signed the head."""
        return hmac.compare_digest(self.signature.encode(), self._signature(key).encode())

    def _signature(self, key: bytes) -> str:
        text = canonical_json([_PURPOSE, self.day.isoformat(), self.position, self.hash])
        return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def read_key(path: Path) -> bytes:
    """Return the key in a file, without white space around it.

    Raises:
        InvalidInput: it cannot be read, or is too short.
    """
    try:
        key = path.read_bytes().strip()
    except OSError as err:
        raise InvalidInput(f"log_key_file: {path} cannot be read: {err.strerror}") from err
    if len(key) < LEAST_KEY_BYTES:
        raise InvalidInput(f"log_key_file: {path} has {len(key)} bytes; a key has {LEAST_KEY_BYTES} at least")
    return key


def read_heads(path: Path) -> list[SignedHead]:
    """Return the heads in a file.

    Raises:
        NotFound: there is no such file.
        InvalidInput: a line is no head.
    """
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError as err:
        raise NotFound(f"no signed heads at {path}") from err
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(SignedHead.model_validate_json(line))
        except ValidationError as err:
            raise InvalidInput(f"{path}, line {number}: not a signed head") from err
    return found


def append_heads(path: Path, heads: Iterable[SignedHead]) -> None:
    """Append heads to a file; they are on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{head.model_dump_json()}\n" for head in heads)
        file.flush()
        os.fsync(file.fileno())


def anchors_of(heads: Iterable[SignedHead], key: bytes) -> tuple[list[Anchor], list[Defect]]:
    """Return the anchors that genuine heads are, and which heads are not genuine."""
    anchors, defects = [], []
    for head in heads:
        if head.is_genuine(key):
            anchors.append(Anchor(head.hash, head.position, f"the signed head of {head.day}", head.day))
        else:
            what = f"the signature of the head of {head.day} is not the key's: it was forged, or the key is another one"
            defects.append(Defect(head.position, f"position {head.position}: {what}"))
    return anchors, defects
