"""State snapshots: the state of a service at a position of the log, as a file beside the log.

A service that starts loads the newest snapshot that fits and folds the rest of the log. A snapshot is a cache: it can
be deleted at any time, nothing but the start of a service reads it, and one that does not fit is ignored. It fits if

- the log has at its position the event with its hash, which covers all events before;
- the same program wrote it: the same code of ``shared`` and of the service, the same decider, the same pydantic;
- it is complete: its text has the length and the SHA-256 that its header says.

A snapshot has the fold of the log up to its position, in log order, and nothing that a service knows from elsewhere. So
it is not a copy of the state of a running service: whoever writes it (``shared.service.state_keeper``) folds the log
from the snapshot before.

The file is two lines: the header, and the state as JSON (``shared.service.state_codec``).

``program_sha256`` is the digest of a part of the program: by it, a program knows whether the same code wrote a file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Generic, TypeVar

import pydantic
from pydantic import Field, ValidationError

from shared.errors import Corrupt, NotFound
from shared.events.union import Recorded
from shared.log.log import EventLog
from shared.machine.durable_files import replace_file
from shared.model import Model
from shared.service.core import Evolve
from shared.service.state_codec import StateCodec

logger = logging.getLogger(__name__)

S = TypeVar("S")

FORMAT = 1
"""The format of the file. A file of another format is ignored."""

_PAGE = 500
"""Records that are read at once, as a follower of the log reads them."""

_LONGEST_HEADER_BYTES = 10_000
"""Longest header that is read, far above any: a file without an end of line is not read whole to find that out."""


_CODE = frozenset({".py", ".pyc"})


def program_sha256(*packages: str) -> str:
    """Return the SHA-256 of the names and the contents of all modules of some packages.

    A version number would say less: it stays the same in a checkout, and a number for each fold would have to be raised
    by hand. To read all of ``shared`` takes milliseconds.

    Raises:
        NotFound: a package has no modules as files.
    """
    digest = hashlib.sha256()
    for package in packages:
        spec = importlib.util.find_spec(package)
        folders = [Path(each) for each in (spec.submodule_search_locations or ())] if spec is not None else []
        modules = sorted((path.relative_to(folder), path) for folder in folders for path in _modules(folder))
        if not modules:
            raise NotFound(f"package {package} has no modules as files")
        for name, path in modules:
            digest.update(f"{package}/{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _modules(folder: Path) -> list[Path]:
    """Return the modules of a package. A compiled module counts only if it stands in place of its source."""
    return [path for path in folder.rglob("*") if path.suffix in _CODE and path.parent.name != "__pycache__"]


@dataclass(frozen=True)
class KeptState(Generic[S]):
    """The part of a service's state that is kept, and how it follows from the log.

    Attributes:
        service: the service's name, that of its package.
        kind: type of the state.
        fold: folds the records after a position (third argument) into the state at that position, which it may change,
            and ends at the latest at another position (fourth). Returns the newest position at which the state has
            nothing from behind it, and the state there. ``each_record`` makes one of a core's ``evolve``.
        decider: the planner's, which says more to people than the digest of the code; 0: the service has none.
    """

    service: str
    kind: type[S]
    fold: Callable[[EventLog, S, int, int], tuple[int, S]]
    decider: int = 0

    @cached_property
    def codec(self) -> StateCodec[S]:
        """Writes and reads the state."""
        return StateCodec(self.kind)

    @cached_property
    def program(self) -> str:
        """The digest of all code that the fold and the codec consist of."""
        return program_sha256("shared", f"services.{self.service}")


class Header(Model):
    """What a snapshot contains.

    ``hash``: that of the event at ``position``. ``sha256``, ``size_bytes``: those of the state's text.
    """

    format: int
    service: str
    position: int = Field(ge=1)
    hash: str
    program: str
    decider: int
    pydantic: str
    sha256: str
    size_bytes: int = Field(ge=0)


@dataclass(frozen=True)
class StateSnapshot(Generic[S]):
    """A state, and the position of the log at which it is the state, with the hash of the event there."""

    position: int
    hash: str
    state: S


class StateSnapshots(Generic[S]):
    """The snapshots of one service in a folder.

    Args:
        folder: is made where it is missing.
        kept: what is kept of the service.
    """

    def __init__(self, folder: Path, kept: KeptState[S]) -> None:
        self.folder = folder
        self._kept = kept
        self._ignored: set[Path] = set()
        """Files about which the log says already why they do not count."""

    def newest(self, log: EventLog) -> StateSnapshot[S] | None:
        """Return the newest snapshot that fits the log; None if none does. Each file that is ignored is logged once.

        Raises:
            Unavailable: the database does not answer.
        """
        for path in self._paths():
            try:
                return self._read(path, log)
            except (Corrupt, OSError) as err:
                self._ignore(path, err.detail if isinstance(err, Corrupt) else str(err))
        return None

    def write(self, log: EventLog, until: int) -> int:
        """Fold the log from the newest snapshot that fits on, write the next one, and return its position.

        The snapshot from which it started is kept, all others are removed. If there is nothing to add to it, nothing is
        written.

        Args:
            log: to fold.
            until: the service has handled everything up to this position.

        Raises:
            Corrupt: a record cannot be read back.
            Unavailable: the database does not answer.
            OSError: the file cannot be written.
        """
        before = self.newest(log)
        start = before.position if before is not None else 0
        state = before.state if before is not None else self._kept.kind()
        position, state = self._kept.fold(log, state, start, until)
        found = log.hash_at(position) if position > start else None
        if found is None:
            return start
        written = self._write(StateSnapshot(position, found, state))
        # Names that begin with a dot are those of unfinished files, which writers that were killed have left.
        for pattern in (f"{self._kept.service}-*", f".{self._kept.service}-*"):
            for path in self.folder.glob(pattern):
                if path not in (written, self._path(start)):
                    path.unlink(missing_ok=True)
        return position

    def _path(self, position: int) -> Path:
        return self.folder / f"{self._kept.service}-{position:012d}.json"

    def _paths(self) -> list[Path]:
        """Return the snapshots, the newest first."""
        return sorted(self.folder.glob(f"{self._kept.service}-*.json"), reverse=True)

    def _ignore(self, path: Path, why: str) -> None:
        if path not in self._ignored:
            logger.warning("state snapshot %s is ignored: %s", path.name, why)
            self._ignored.add(path)

    def _read(self, path: Path, log: EventLog) -> StateSnapshot[S]:
        """Return a snapshot.

        Raises:
            Corrupt: it is damaged, or does not fit.
            Unavailable: the database does not answer.
            OSError: it cannot be read.
        """
        with path.open("rb") as file:
            header = self._header(file.readline(_LONGEST_HEADER_BYTES))
            if log.hash_at(header.position) != header.hash:
                raise Corrupt(f"the log does not have its event at position {header.position}")
            text = file.read()
        if len(text) != header.size_bytes or hashlib.sha256(text).hexdigest() != header.sha256:
            raise Corrupt("it is damaged")
        try:
            state = self._kept.codec.load(text)
        except Exception as err:  # whatever is wrong with a cache, the log has all of it
            raise Corrupt(f"its state cannot be read: {type(err).__name__}") from err
        return StateSnapshot(header.position, header.hash, state)

    def _header(self, line: bytes) -> Header:
        try:
            header = Header.model_validate_json(line)
        except ValidationError as err:
            raise Corrupt("its header cannot be read") from err
        kept = self._kept
        if header.format != FORMAT or header.service != kept.service:
            raise Corrupt(f"it is one of {header.service!r} in format {header.format}")
        if header.decider != kept.decider:
            raise Corrupt(f"decider {header.decider} wrote it, this is decider {kept.decider}")
        if header.program != kept.program or header.pydantic != pydantic.VERSION:
            raise Corrupt("another version of the program wrote it")
        return header

    def _write(self, snapshot: StateSnapshot[S]) -> Path:
        """Write a snapshot so that it is there whole or not at all, also after a power failure; return its path."""
        text = self._kept.codec.dump(snapshot.state)
        header = Header(
            format=FORMAT,
            service=self._kept.service,
            position=snapshot.position,
            hash=snapshot.hash,
            program=self._kept.program,
            decider=self._kept.decider,
            pydantic=pydantic.VERSION,
            sha256=hashlib.sha256(text).hexdigest(),
            size_bytes=len(text),
        )
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(snapshot.position)
        replace_file(path, header.model_dump_json().encode() + b"\n", text, mode=0o600)
        return path


def each_record(evolve: Evolve[S]) -> Callable[[EventLog, S, int, int], tuple[int, S]]:
    """Return the fold of a service that folds each record in its turn."""

    def fold(log: EventLog, state: S, after: int, until: int) -> tuple[int, S]:
        for record in takewhile(lambda each: each.position <= until, records(log, after)):
            state, after = evolve(state, record.event, record.recorded_at), record.position
        return after, state

    return fold


def records(log: EventLog, after: int) -> Iterator[Recorded]:
    """Yield the records after a position, in order, as they are read page by page.

    Raises:
        Corrupt: a record cannot be read back.
        Unavailable: the database does not answer.
    """
    while page := log.read(after=after, limit=_PAGE):
        yield from page
        after = page[-1].position
