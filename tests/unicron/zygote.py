"""One process that has imported what fork servers preload, which takes seconds.

Each test's fork server is forked from it, and so are programs that train without an agent.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import functools
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unicron import forkserver
from unicron.process import processes

WRITES_AT_ONCE = {"UNICRON_TEST_WRITES_AT_ONCE": "1"}
"""Environment of a rank that trains on only when its part of a checkpoint is written, and on rank 0 the checkpoint too.

A checkpoint that a rank begins after step n is then published in step n + 1. Without this, the disk decides which steps
have one.
"""

ROOT = Path(__file__).resolve().parents[2]

_PID = struct.Struct("i")

_MAX_REQUEST_BYTES = 1 << 16


def environment() -> dict[str, str]:
    """Return what a fork server of the tests runs with: its ranks report everything that they do."""
    fixed = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONWARNINGS": "ignore",
        "UNICRON_ORPHAN_GRACE_S": "2",
        "UNICRON_REPORT_INTERVAL_S": "0",
        # On a busy machine a healthy replica may stand still for longer than it may by default.
        "UNICRON_FINISH_FLOOR_S": "600",
    }
    return os.environ | fixed


class Zygote:
    """The process, as its parent sees it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "tests.unicron.zygote", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), env=environment(), start_new_session=True, stdin=subprocess.DEVNULL
        )
        theirs.close()
        atexit.register(self.close)
        self._lock = threading.Lock()

    def fork(self, agent: int, output: int) -> int:
        """Fork a fork server that listens on ``agent`` and writes to ``output`` (descriptors); return its pid."""
        return self._fork({}, [agent, output])

    def run(self, arguments: Sequence[str], directory: Path) -> None:
        """Run a program, as ``python -P`` with these arguments in a directory would; what it prints is not kept.

        Raises:
            subprocess.CalledProcessError: its exit status is not 0.
        """
        ended, ending = os.pipe()
        with (directory / "output").open("ab") as output, os.fdopen(ended, "rb") as status:
            try:
                self._fork({"arguments": list(arguments), "directory": str(directory)}, [ending, output.fileno()])
            finally:
                os.close(ending)
            # Nothing is written by a process that dies.
            code = int(status.read() or b"-1")
        if code != 0:
            raise subprocess.CalledProcessError(code, arguments, (directory / "output").read_text())

    def _fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            (pid,) = _PID.unpack(self._control.recv(_PID.size))
        return int(pid)

    def close(self) -> None:
        """End the process."""
        self._control.close()
        self._process.kill()
        self._process.wait()


@functools.cache
def zygote() -> Zygote:
    """Return this test process's own."""
    return Zygote()


def _run(arguments: list[str], directory: str) -> int:
    """Be a program; return its exit status."""
    code: int | str | None = 0
    try:
        os.chdir(directory)
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def _obey_writes_at_once() -> None:
    """Have ranks forked from here do what ``WRITES_AT_ONCE`` asks for."""
    from unicron.checkpoint.writer import Writer

    begin, agreed = Writer.begin, Writer.agreed

    def wait(future: concurrent.futures.Future[None] | None) -> None:
        if future is not None and WRITES_AT_ONCE.items() <= os.environ.items():
            concurrent.futures.wait([future])

    @functools.wraps(begin)
    def begin_and_wait(self: Writer, *arguments: Any) -> None:
        begin(self, *arguments)
        wait(self._part.written if self._part is not None else None)

    @functools.wraps(agreed)
    def agreed_and_wait(self: Writer, *arguments: Any) -> concurrent.futures.Future[None] | None:
        publication = agreed(self, *arguments)
        wait(publication)
        return publication

    Writer.begin, Writer.agreed = begin_and_wait, agreed_and_wait  # type: ignore[assignment, method-assign]


def _obey_contract() -> None:
    """Have ranks forked from here use the contract backend where their environment says so."""
    from tests.unicron.contract import backend
    from unicron import train

    child = train.child

    @functools.wraps(child)
    def install_and_train() -> int:
        backend.install_if_asked()
        return child()

    train.child = install_and_train


def main(control: socket.socket) -> None:
    """Be the process, until its parent is gone."""
    forkserver.preload()
    _obey_writes_at_once()
    _obey_contract()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need no wait
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 2)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            os.setsid()
            answer, output = descriptors
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            request = json.loads(data)
            if request:
                ctypes.CDLL(None).prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.write(answer, str(_run(request["arguments"], request["directory"])).encode())
                os._exit(0)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            ctypes.CDLL(None).prctl(processes.PR_SET_PDEATHSIG, signal.SIGTERM)
            os._exit(forkserver.ForkServer(socket.socket(fileno=answer)).run())
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(_PID.pack(pid))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
