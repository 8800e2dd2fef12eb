"""One process that has imported what fork servers preload, which takes seconds, and forks one for each test."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

from unicron import forkserver

ROOT = Path(__file__).resolve().parents[2]

_PID = struct.Struct("i")


def environment() -> dict[str, str]:
    """Return what a fork server of the tests runs with."""
    return dict(os.environ, PYTHONPATH=str(ROOT), UNICRON_ORPHAN_GRACE_S="2", PYTHONWARNINGS="ignore")


class Zygote:
    """The process, as its parent sees it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "tests.unicron.zygote", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), env=environment(), start_new_session=True, stdin=subprocess.DEVNULL
        )
        theirs.close()
        atexit.register(self.close)

    def fork(self, agent: int, output: int) -> int:
        """Fork a fork server that speaks on ``agent`` and writes to ``output`` (descriptors); return its pid."""
        socket.send_fds(self._control, [b"."], [agent, output])
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


def main(control: socket.socket) -> None:
    """Be the process, until its parent is gone."""
    forkserver.preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need no wait
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            os.setsid()
            agent, output = descriptors
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            os._exit(forkserver.ForkServer(socket.socket(fileno=agent)).run())
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(_PID.pack(pid))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
