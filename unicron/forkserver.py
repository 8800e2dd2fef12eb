"""A warm parent that forks training processes: ``python -P -m unicron.forkserver --fd N [--no-preload]``.

Importing torch and megatron-core takes seconds; a process forked from one that has imported them starts in
milliseconds. The server has a single thread, because a fork copies locks that other threads have taken. It never uses
CUDA, because a child cannot use CUDA that its parent has initialised. A rendezvous store, which has threads, runs in a
forked child too.

The server and its node agent exchange JSON lines. The inherited socket ``N`` listens for agents, one after the other:

    agent -> server  {"do": "fork", "id", "task", "worker", "spec", "output", "stacks", "env", "uid"}
                     {"do": "store", "id", "host", "output", "uid"}
                     {"do": "check", "id", "output", "memory_bytes", "devices"}   (``self_check``; "forked" answers)
                     {"do": "acknowledge", "id"}                     (the end of this process need not be said again)
    server -> agent  {"event": "ready", "pid", "version", "newest", "library"}    (``unicron.protocol.versions``)
                     {"event": "forked", "id", "pid"}
                     {"event": "store", "id", "pid", "port"}
                     {"event": "stopped", "id", "pid"}               (by a signal)
                     {"event": "continued", "id", "pid"}
                     {"event": "exited", "id", "pid", "code"}        (code < 0: minus the signal's number)
                     {"event": "error", "id", "detail"}              (a request that could not be carried out)

Both sides ignore fields that they do not know. A line that is no request is answered with an error, and dropped.

An agent that connects gets first ``forked`` for each child that lives, then ``exited`` for each end that no agent has
acknowledged, then ``ready``. So its successor misses nothing.

Each child runs in a session of its own, writes to ``output`` and ends with the server (parent-death signal). Processes
that a child has started end with the child if they are still in its process group. The server ends, together with its
children, on ``END_SIGNAL``, which its parent's end sends as well (``--parent``), and on SIGTERM. That is blocked where
its parent leaves it to a program above (``take_sigterm``).
"""

from __future__ import annotations

import argparse
import contextlib
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

from unicron.process import output as process_output
from unicron.process import preloading, self_check
from unicron.process.fork_requests import error_detail, read_request
from unicron.process.processes import (
    become,
    belongs_to,
    end_with_parent,
    kill_group,
    peer,
    redirect,
    take_sigterm,
    write_stacks,
)
from unicron.protocol import environment
from unicron.protocol.versions import OLDEST, VERSION, __version__

preloading.keep_quiet(os.environ)

# Otherwise torch.cuda.is_available() initialises CUDA, and no child could use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

STORE_BACKLOG = 1024
"""Connections that may wait to be accepted by a store. Chosen: all ranks of a task connect at once."""

END_SIGNAL = signal.SIGRTMIN
"""With what its parent asks the server to end (``shared.machine.process``)."""


class ForkServer:
    """The loop of the server: it handles requests, reports events and reaps children."""

    def __init__(self, listener: socket.socket, supervisor: int | None = None) -> None:
        """Prepare the server.

        Args:
            listener: the socket on which node agents connect.
            supervisor: pid of the process whose children may connect, besides itself; None: any process of the user.
        """
        self._supervisor = supervisor
        self._listener = listener
        self._agent: socket.socket | None = None
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, tuple[str, int]] = {}
        """Descriptor of the child's process (pidfd) -> request id, pid."""
        self._ports: dict[int, tuple[str, int]] = {}
        """Read end of the pipe on which a store reports its port -> request id, pid."""
        self._ends: dict[str, dict[str, Any]] = {}
        """Request id -> event of the ends that no agent has acknowledged."""
        self._buffer = bytearray()
        self._signals, self._signalled = socket.socketpair()
        self._signals.setblocking(False)
        self._signalled.setblocking(False)

    def run(self) -> int:
        """Serve until asked to end; return 0."""
        self._selector.register(self._signals, selectors.EVENT_READ)
        # There is no descriptor to poll for a stopped child. Its SIGCHLD writes a byte to this socket pair.
        for number in (signal.SIGCHLD, signal.SIGTERM, END_SIGNAL):
            signal.signal(number, lambda number, frame: None)
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            return self._serve()
        finally:
            for _, pid in self._children.values():
                kill_group(pid)

    def _serve(self) -> int:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._agent:
                    self._receive()
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._signals:
                    if self._must_end():
                        return 0
                    self._report_stops()
                elif key.fd in self._children:
                    self._reap(key.fd)
                elif key.fd in self._ports:
                    self._report_port(key.fd)

    def _accept(self) -> None:
        """Turn to the agent that connects, since the agent before it has ended."""
        connection, _ = self._listener.accept()
        pid, uid = peer(connection)
        # A rank may have the same user, but it is this server's child, and never the supervisor's.
        if uid != os.geteuid() or (self._supervisor is not None and not belongs_to(pid, self._supervisor)):
            connection.close()
            return
        self._drop_agent()
        self._greet(connection)

    def _greet(self, agent: socket.socket) -> None:
        """Tell an agent what there is already, and serve it."""
        self._agent = agent
        self._selector.register(agent, selectors.EVENT_READ)
        for request_id, pid in self._children.values():
            self._emit(event="forked", id=request_id, pid=pid)
        for end in self._ends.values():
            self._emit(**end)
        self._emit(event="ready", pid=self._pid, version=OLDEST, newest=VERSION, library=__version__)

    def _drop_agent(self) -> None:
        """Forget the agent, and the part of a request that it has sent."""
        if self._agent is not None:
            self._selector.unregister(self._agent)
            self._agent.close()
        self._agent = None
        self._buffer.clear()

    def _emit(self, **event: Any) -> None:
        # A blocking send: an agent that does not read is about to be lost anyway. A closed socket is not an error here.
        if self._agent is not None:
            with contextlib.suppress(OSError):
                self._agent.sendall(json.dumps(event).encode() + b"\n")

    def _receive(self) -> None:
        """Handle the requests that have arrived."""
        assert self._agent is not None
        try:
            data = self._agent.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop_agent()
            return
        self._buffer += data
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            request: dict[str, Any] = {}
            try:
                request = read_request(line)
                self._handle(request)
            except (OSError, ValueError) as err:
                self._emit(event="error", id=request.get("id", ""), detail=error_detail(err))

    def _handle(self, request: dict[str, Any]) -> None:
        match request["do"]:
            case "fork":
                pid = self._fork(request, lambda: _train(request))
                self._emit(event="forked", id=request["id"], pid=pid)
            case "store":
                self._start_store(request)
            case "check":
                pid = self._fork(request, lambda: self_check.run(request))
                self._emit(event="forked", id=request["id"], pid=pid)
            case "acknowledge":
                self._ends.pop(request["id"], None)
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
            redirect(output)
            stacks = write_stacks(request.get("stacks"))
            if (uid := request.get("uid")) is not None:
                become(uid)
            if not end_with_parent(self._pid, signal.SIGKILL):
                os._exit(1)
            process_output.protect()
            self._leave_server()
            os.environ.update(request.get("env") or {})
            os.environ[environment.STACKS] = str(stacks)
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
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, END_SIGNAL):
            signal.signal(number, signal.SIG_DFL)
        take_sigterm()
        self._selector.close()
        for connection in (self._listener, self._agent, self._signals, self._signalled):
            if connection is not None:
                connection.close()
        for descriptor in (*self._children, *self._ports):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _must_end(self) -> bool:
        """Read the numbers of the signals that have come; return whether the server has to end."""
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            while read := self._signals.recv(4096):
                numbers += read
        return signal.SIGTERM in numbers or END_SIGNAL in numbers

    def _report_stops(self) -> None:
        """Report the children that were stopped, or continued, since the last call."""
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
        kill_group(self._children[pidfd][1])
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        assert result is not None
        self._selector.unregister(pidfd)
        os.close(pidfd)
        request_id, pid = self._children.pop(pidfd)
        for reading, (_, store_pid) in list(self._ports.items()):
            if store_pid == pid:
                self._report_port(reading)
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        self._ends[request_id] = {"event": "exited", "id": request_id, "pid": pid, "code": code}
        self._emit(**self._ends[request_id])


def _train(request: dict[str, Any]) -> int:
    """Run a training process; return its exit code."""
    from unicron import train

    os.nice(int(environment.number(environment.RANK_NICE)))
    for name in (*environment.TORCHRUN, environment.GENERATION):
        os.environ.pop(name, None)  # of whoever started the agent; a rank sets its own as it joins
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
    parser.add_argument("--fd", type=int, required=True, help="inherited socket that listens for agents")
    parser.add_argument("--parent", type=int, help="pid of the process with which the server ends")
    parser.add_argument("--no-preload", action="store_true", help="import nothing beforehand")
    options = parser.parse_args()
    if options.parent is not None and not end_with_parent(options.parent, END_SIGNAL):
        return 1
    listener = socket.socket(fileno=options.fd)
    listener.set_inheritable(False)
    listener.setblocking(True)
    with preloading.ThreadWatch() as threads:
        if not options.no_preload:
            preload()
    if found := preloading.warning(threads.started()):
        print(f"unicron.forkserver: {found}", file=sys.stderr, flush=True)
    # Ctrl-C reaches the program that the user started, which ends this server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return ForkServer(listener, options.parent).run()


if __name__ == "__main__":
    sys.exit(main())
