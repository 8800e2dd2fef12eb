"""Tokens of the api: who may ask it for what. The file has their digests only.

A token is 32 random bytes, so its SHA-256 needs neither salt nor a slow function: there is nothing to guess.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from shared.errors import Conflict, Corrupt, NotFound, Unavailable
from shared.machine.durable_files import replace_file
from shared.model import Model
from shared.names import Name

TOKEN_BYTES = 32
"""The length of a token: as many bytes as its digest has."""

PREFIX = "unicron_"
"""The beginning of every token, by which people and secret scanners know one."""


class Scope(StrEnum):
    """What a token allows; each scope includes those before it, but that ``REPORT`` is for monitors alone."""

    REPORT = "report"
    """The bearer may report troubles of the nodes that the token names, and do nothing else."""
    READ = "read"
    SUBMIT = "submit"
    """The bearer may submit tasks, and stop those that it owns."""
    OPERATE = "operate"
    """The bearer may do everything, also with nodes and other users' tasks."""

    def includes(self, other: Scope) -> bool:
        """Return whether this scope allows what another does."""
        if other is Scope.REPORT:
            return self in (Scope.REPORT, Scope.OPERATE)
        order = list(Scope)
        return order.index(self) >= order.index(other)


NODE_PATTERN = r"^[a-z0-9*-]{1,63}$"
"""The name of a node, or of several where ``*`` stands for any characters."""


class Token(Model):
    """A token as the file has it.

    ``name``: the name of its bearer, who owns the tasks that it submits. ``nodes``: patterns of the nodes of which a
    bearer with the scope ``report`` may report: names in which ``*`` stands for any characters.
    """

    name: Name
    scope: Scope
    nodes: list[Annotated[str, Field(pattern=NODE_PATTERN)]] = Field(default_factory=list)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    created_at: datetime


_FILE: TypeAdapter[list[Token]] = TypeAdapter(list[Token])


def digest(token: str) -> str:
    """Return what the file has of a token."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


def read(path: Path) -> list[Token]:
    """Return the tokens in a file; none if there is no file.

    Raises:
        Corrupt: the file is no list of tokens.
        Unavailable: it cannot be read.
    """
    try:
        return _FILE.validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as err:
        raise Unavailable(f"{path}: {err.strerror or err}") from err
    except ValidationError as err:
        raise Corrupt(f"{path} is no list of tokens: {err.errors(include_url=False)[0]['msg']}") from err


def add(path: Path, name: str, scope: Scope, now: datetime, nodes: Sequence[str] = ()) -> str:
    """Make a token, write its digest to the file, and return the token, which nobody can find out later.

    ``nodes``: as ``Token`` has them.

    Raises:
        Conflict: a token has this name.
        Corrupt, Unavailable: as ``read``; or the file cannot be written.
    """
    token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    with _changing(path) as tokens:
        if any(known.name == name for known in tokens):
            raise Conflict(f"there is a token named {name!r}; remove it first, or take another name")
        tokens.append(Token(name=name, scope=scope, nodes=list(nodes), sha256=digest(token), created_at=now))
    return token


def remove(path: Path, name: str) -> None:
    """Take a token out of the file: whoever bears it is refused from the next request on.

    Raises:
        NotFound: no token has this name.
        Corrupt, Unavailable: as ``add``.
    """
    with _changing(path) as tokens:
        kept = [token for token in tokens if token.name != name]
        if len(kept) == len(tokens):
            raise NotFound(f"no token named {name!r}")
        tokens[:] = kept


def find(tokens: list[Token], given: str) -> Token | None:
    """Return the token whose text is given, in a time that does not depend on how much of a digest is right."""
    sha256 = digest(given)
    return next((token for token in tokens if hmac.compare_digest(token.sha256, sha256)), None)


@contextmanager
def _changing(path: Path) -> Iterator[list[Token]]:
    """Give the caller the tokens, and write what it makes of them: whole or not at all, one caller at a time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tokens = read(path)
            yield tokens
            replace_file(path, _FILE.dump_json(tokens, indent=1), mode=0o600)
    except OSError as err:
        raise Unavailable(f"{path}: {err.strerror or err}") from err
