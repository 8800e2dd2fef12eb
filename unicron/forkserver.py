"""A warm parent that forks training processes: ``python -P -m unicron.forkserver --fd N [--no-preload]``.

Importing torch and megatron-core takes seconds; a process forked from one that has imported them starts in
milliseconds. The server has a single thread, because a fork copies locks that other threads have taken. It never uses
CUDA, because a child cannot use CUDA that its parent has initialised. A rendezvous store, which has threads, runs in a
forked child too.

The server and its node agent exchange JSON lines on the inherited socket ``N``:

    agent -> server  {"do": "fork", "id", "task", "worker", "spec", "output", "env"}
                     {"do": "store", "id", "host", "output"}
                     {"do": "exit"}
    server -> agent  {"event": "ready", "pid", "version"}
                     {"event": "forked", "id", "pid"}
                     {"event": "store", "id", "pid", "port"}
                     {"event": "stopped", "id", "pid"}               (by a signal)
                     {"event": "continued", "id", "pid"}
                     {"event": "exited", "id", "pid", "code"}        (code < 0: minus the signal's number)
                     {"event": "error", "id", "detail"}              (a request that could not be carried out)

Both sides ignore fields that they do not know. A line that is no request is answered with an error, and dropped.

Each child runs in a session of its own, writes to ``output`` and ends with the server (parent-death signal). Processes
that a child has started end with the child if they are still in its process group. Once the agent has closed the
socket, the server ends together with its children after ``UNICRON_ORPHAN_GRACE_S`` without an event.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from unicron import environment
from unicron import output as process_output

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    # Set before torch and numpy are imported: their thread pools do not survive a fork.
    os.environ.setdefault(_variable, "1")

# Otherwise torch.cuda.is_available() initialises CUDA, and no child could use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""

VERSION = 1
"""Version of the messages, sent with ``ready``: one higher with every change that an older agent would misread."""

STORE_BACKLOG = 1024
"""Connections that may wait to be accepted by a store. Chosen: all ranks of a task connect at once."""


ERROR_CHARACTERS = 1000
"""Longest error sent: a path, and what is wrong with it. The agent reads lines of up to 64 KiB."""

_TEXTS = {"fork": ("id", "task", "worker", "spec", "output"), "store": ("id", "host", "output")}
"""The fields that each request needs."""


class ForkServer:
    """The loop of the server: it handles requests, reports events and reaps children."""

    def __init__(self, agent: socket.socket) -> None:
        """Prepare the server.

        Args:
            agent: the connected socket to the node agent.
        """
        self._agent = agent
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, tuple[str, int]] = {}
        """Descriptor of the child's process (pidfd) -> request id, pid."""
        self._ports: dict[int, tuple[str, int]] = {}
        """Read end of the pipe on which a store reports its port -> request id, pid."""
        self._buffer = bytearray()
        self._attached = True
        self._signals, self._signalled = socket.socketpair()
        self._signals.setblocking(False)
        self._signalled.setblocking(False)

    def run(self) -> int:
        """Serve until the agent requests an exit, or until the grace period without an agent is over; return 0."""
        self._selector.register(self._agent, selectors.EVENT_READ)
        self._selector.register(self._signals, selectors.EVENT_READ)
        # There is no descriptor to poll for a stopped child. Its SIGCHLD writes a byte to this socket pair.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        self._emit(event="ready", pid=self._pid, version=VERSION)
        try:
            return self._serve()
        finally:
            for _, pid in self._children.values():
                _kill_group(pid)

    def _serve(self) -> int:
        while True:
            timeout = None if self._attached else environment.number(environment.ORPHAN_GRACE_S)
            ready = self._selector.select(timeout)
            if not ready and not self._attached:
                return 0
            for key, _ in ready:
                if key.fileobj is self._agent:
                    if not self._receive():
                        return 0
                elif key.fileobj is self._signals:
                    self._report_stops()
                elif key.fd in self._children:
                    self._reap(key.fd)
                elif key.fd in self._ports:
                    self._report_port(key.fd)

    def _emit(self, **event: Any) -> None:
        # A blocking send: an agent that does not read is about to be lost anyway. A closed socket is not an error here.
        with contextlib.suppress(OSError):
            self._agent.sendall(json.dumps(event).encode() + b"\n")

    def _receive(self) -> bool:
        """Handle the requests that have arrived; return False if one is to exit."""
        try:
            data = self._agent.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._attached = False
            self._selector.unregister(self._agent)
            return True
        self._buffer += data
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            request: dict[str, Any] = {}
            try:
                request = _request(line)
                if request["do"] == "exit":
                    return False
                self._handle(request)
            except (OSError, ValueError) as err:
                detail = f"{type(err).__name__}: {err}"[:ERROR_CHARACTERS]
                self._emit(event="error", id=request.get("id", ""), detail=detail)
        return True

    def _handle(self, request: dict[str, Any]) -> None:
        match request["do"]:
            case "fork":
                pid = self._fork(request, lambda: _train(request))
                self._emit(event="forked", id=request["id"], pid=pid)
            case "store":
                self._start_store(request)
            case unknown:
                raise ValueError(f"unknown request {unknown!r}")

    def _start_store(self, request: dict[str, Any]) -> None:
        """Fork a rendezvous store; ``_report_port`` reports it once it listens."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            pid = self._fork(request, lambda: _store(request["host"], writing))
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._ports[reading] = (request["id"], pid)
        self._selector.register(reading, selectors.EVENT_READ)

    def _report_port(self, reading: int) -> None:
        """Report the port that a store has written to its pipe."""
        # One short write arrives whole. Of a store that has died nothing arrives; the event ``exited`` reports it.
        text = os.read(reading, 64)
        self._selector.unregister(reading)
        os.close(reading)
        request_id, pid = self._ports.pop(reading)
        if text:
            self._emit(event="store", id=request_id, pid=pid, port=int(text))

    def _fork(self, request: dict[str, Any], work: Callable[[], int]) -> int:
        """Fork a child that does ``work`` and exits with the code that ``work`` returns; return the child's pid.

        Raises:
            OSError: the output cannot be opened, or there can be no more processes.
        """
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        pid = os.fork()
        if pid == 0:
            self._child(request, work, output)
        os.close(output)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (request["id"], pid)
        self._selector.register(pidfd, selectors.EVENT_READ)
        return pid

    def _child(self, request: dict[str, Any], work: Callable[[], int], output: int) -> NoReturn:
        code = 1
        try:
            os.setsid()
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(1)  # the server ended before the parent-death signal was set
            _redirect(output)
            process_output.protect()
            self._leave_server()
            # kill -USR2 writes the Python stack of every thread to the output, to see what a hanging rank does.
            faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
            os.environ.update(request.get("env") or {})
            code = work()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _leave_server(self) -> None:
        """Close, in a child, the server's descriptors and undo its signal handlers."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        for connection in (self._agent, self._signals, self._signalled):
            connection.close()
        for descriptor in (*self._children, *self._ports):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _report_stops(self) -> None:
        """Report the children that were stopped, or continued, since the last call."""
        with contextlib.suppress(BlockingIOError):
            while self._signals.recv(4096):
                pass
        for pidfd, (request_id, pid) in list(self._children.items()):
            try:
                result = os.waitid(os.P_PIDFD, pidfd, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            except ChildProcessError:
                continue  # the child has ended, which its pidfd reports
            if result is not None:
                event = "stopped" if result.si_code == os.CLD_STOPPED else "continued"
                self._emit(event=event, id=request_id, pid=pid)

    def _reap(self, pidfd: int) -> None:
        """Kill the rest of an ended child's process group, reap the child and report its exit code."""
        if os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        # The child is not reaped yet, so its pid, which is also the number of its group, is not in use again.
        _kill_group(self._children[pidfd][1])
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        assert result is not None
        self._selector.unregister(pidfd)
        os.close(pidfd)
        request_id, pid = self._children.pop(pidfd)
        for reading, (_, store_pid) in list(self._ports.items()):
            if store_pid == pid:
                self._report_port(reading)
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        self._emit(event="exited", id=request_id, pid=pid, code=code)


def _request(line: bytes) -> dict[str, Any]:
    """Return the request in a line.

    Raises:
        ValueError: not a request, or a field that the request needs is missing or has another type.
    """
    try:
        request = json.loads(line)
    except RecursionError as err:
        raise ValueError("nested too deeply") from err
    if not isinstance(request, dict):
        raise ValueError("not a JSON object")
    do = request.get("do")
    for name in ("do", *(_TEXTS.get(do, ()) if isinstance(do, str) else ())):
        if not isinstance(request.get(name), str) or "\0" in request[name]:
            raise ValueError(f"{name} must be text without null bytes")
    env = request.get("env") or {}
    if not isinstance(env, dict) or not all(isinstance(text, str) for text in (*env, *env.values())):
        raise ValueError("env must map text to text")
    return request


def _kill_group(pid: int) -> None:
    """Kill the process group of a child that is not reaped yet: its processes would go on using memory and devices."""
    # No such group: the child ended before it had one. No permission: only processes of another user are left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _redirect(output: int) -> None:
    """Redirect standard input to nothing, and standard output and error to ``output``."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def _train(request: dict[str, Any]) -> int:
    """Run a training process; return its exit code."""
    from unicron import train

    os.nice(int(environment.number(environment.RANK_NICE)))
    os.environ[environment.SPEC] = request["spec"]
    os.environ[environment.TASK] = request["task"]
    os.environ[environment.WORKER] = request["worker"]
    return train.child()


def _store(host: str, writing: int) -> int:
    """Run a rendezvous store until the process is killed, once its port is written to the pipe ``writing``."""
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # Bound here, because torch would listen on all interfaces.
    listener.bind((host, 0))
    listener.listen(STORE_BACKLOG)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    os.write(writing, str(port).encode())
    os.close(writing)
    while store is not None:
        signal.pause()
    return 0


def preload() -> None:
    """Import what training processes need."""
    from unicron.megatron import cpu

    cpu.enable()
    from unicron import train

    train.imports()
    # Imported objects stay alive. Frozen, they are not visited, and their pages not copied, by collections in children.
    gc.collect()
    gc.freeze()


def main() -> int:
    """Run the server on an inherited socket."""
    parser = argparse.ArgumentParser(prog="unicron.forkserver", description="Forks training processes for an agent.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the node agent")
    parser.add_argument("--no-preload", action="store_true", help="import nothing beforehand")
    options = parser.parse_args()
    agent = socket.socket(fileno=options.fd)
    agent.set_inheritable(False)
    agent.setblocking(True)
    if not options.no_preload:
        preload()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        print(f"unicron.forkserver: {threads} threads after preloading; forked processes may deadlock", file=sys.stderr)
    # Ctrl-C reaches the program that the user started, which ends the agent; the agent ends this server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return ForkServer(agent).run()


if __name__ == "__main__":
    sys.exit(main())
