"""The fold in a process of its own, which does nothing else: `python -m services.api.fold_process`.

To fold a thousand events a second, and to settle their time, takes a third of a core. In a thread of the gateway, fold
and answers took the interpreter from each other: fifty viewers of the live page were up to 1.2 s behind the log, and
are up to 0.9 s (``benchmarks/viewers.py``). The gateway sends one call at a time over a pair of sockets, and waits for
its answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from pydantic import TypeAdapter

from services.api.findings import Found, Observe
from services.api.store import Store
from shared.collector import SHORT_PAUSES, collect_seldom
from shared.errors import Unavailable, UnicronError
from shared.events import Recorded
from shared.log_lines import log_to_stderr
from shared.parent import die_with_parent
from shared.privacy import hide_memory

_EXIT_S = 2.0
"""Until a process that was told to end is killed. The end takes milliseconds, as no call is under way."""

_NO_PROCESS = "none"
"""No name below ``/proc``: then there are no metrics."""

_RECORDS: TypeAdapter[Sequence[Recorded]] = TypeAdapter(Sequence[Recorded])
"""Records are sent as JSON, from which they are made in half the time that pickle takes."""


class FoldProcess:
    """Folds as a ``Store`` does, in a process of its own; safe to use from threads.

    The first call starts the process, and so does the first call after an end of the process. Each call raises
    ``Unavailable`` where the process has ended meanwhile, or the database does not answer. The kernel ends the process
    with the thread that has started it, at the latest; threads of ``asyncio.to_thread`` last as long as the gateway.

    Args:
        url: SQLAlchemy URL of the projections.
        registry: gets what the kernel knows about the process (``unicron_fold_process_*``); None: nothing does.
    """

    def __init__(self, url: str, registry: CollectorRegistry | None = None) -> None:
        self._url = url
        ProcessCollector(namespace="unicron_fold", pid=lambda: self.pid or _NO_PROCESS, registry=registry)
        self._calling = threading.Lock()
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def head(self) -> tuple[int, str]:
        """Return the position up to which the log has been folded, and the hash of its record."""
        position, hash_ = self._call("head")
        return position, hash_

    def reset(self) -> None:
        """Drop everything; the next fold starts at position 0."""
        self._call("reset")

    def fold(self, records: Sequence[Recorded], observe: Observe) -> int:
        """Fold records and return the position. If the process ends before the answer, what was found may be lost."""
        position, found = self._call("fold", _RECORDS.dump_json(records, by_alias=True))
        observe(found)
        return int(position)

    def settle(self) -> None:
        """Settle time as far as the folded records allow."""
        self._call("settle")

    def close(self) -> None:
        """End the process, once it has answered the call under way."""
        with self._calling:
            self._end()

    @property
    def pid(self) -> int | None:
        """Of the process; None: none runs."""
        process = self._process
        return None if process is None else process.pid

    def _call(self, name: str, *arguments: bytes) -> Any:
        with self._calling:
            try:
                if self._connection is None:
                    self._start()
                assert self._connection is not None
                self._connection.send((name, *arguments))
                answer = self._connection.recv()
            except (EOFError, OSError) as err:
                how = self._end() or f"cannot be started: {err}"
                raise Unavailable(f"the process that folds {how}") from err
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._connection = Connection(ours.detach())
            self._process = subprocess.Popen(  # nosec B603 # no shell; the program is this module
                [
                    *(sys.executable, "-P", "-m", "services.api.fold_process"),
                    *(str(theirs.fileno()), str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the gateway alone
            )
        self._connection.send(self._url)

    def _end(self) -> str:
        """End the process if it has not ended; return how it has, in words, or an empty text if there was none."""
        connection, process = self._connection, self._process
        self._connection = self._process = None
        if connection is not None:
            connection.close()
        if process is None:
            return ""
        try:
            code = process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return f"has ended with exit status {code}" if code >= 0 else f"was ended by signal {-code}"


class _Answers:
    """Answers calls of the gateway; the database is opened with the first one, and need not be there before."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._store: Store | None = None

    def answer(self, name: str, *arguments: bytes) -> Any:
        if self._store is None:
            self._store = Store(self._url)
        if name == "fold":
            found: list[Found] = []
            position = self._store.fold(_RECORDS.validate_json(arguments[0]), found.append)
            return position, found[0]
        return getattr(self._store, name)()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def serve(connection: Connection) -> None:
    """Answer calls until the other end is closed. An error is sent as the answer to its call."""
    answers = _Answers(connection.recv())
    collect_seldom(SHORT_PAUSES)
    with contextlib.closing(answers), contextlib.suppress(EOFError):
        while True:
            call = connection.recv()
            try:
                answer = answers.answer(*call)
            except UnicronError as err:
                answer = err
            except Exception as err:
                # An exception of another kind may be none that can be sent, and nothing depends on its kind.
                answer = RuntimeError(f"in the process that folds: {''.join(traceback.format_exception(err))}")
            connection.send(answer)


def main(descriptor: int, parent: int) -> int:
    """Serve the gateway.

    Args:
        descriptor: of the socket to it.
        parent: its pid.
    """
    log_to_stderr("api")
    hide_memory()
    if not die_with_parent(signal.SIGKILL, parent):
        return 1
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, ConnectionError):
        serve(connection)
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
