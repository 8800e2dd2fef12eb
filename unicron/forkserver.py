"""A warm parent that forks training processes: ``python -P -m unicron.forkserver --fd N [--no-preload]``.

Importing torch and megatron-core takes seconds; a process forked from one that has done so starts in milliseconds.
The server stays single-threaded, never touches CUDA (a child may not use what its parent initialised) and never hosts
a store itself (its threads would make forking unsafe): a store is a forked child too.

It speaks JSON lines with its node agent on the inherited socket ``N``:

    agent -> server  {"do": "fork", "id", "task", "worker", "spec", "output", "env"}
                     {"do": "store", "id", "host", "output"}
                     {"do": "exit"}
    server -> agent  {"event": "ready", "pid"}
                     {"event": "forked", "id", "pid"}
                     {"event": "store", "id", "pid", "port"}
                     {"event": "stopped", "id", "pid"}               (by a signal, not by a debugger)
                     {"event": "continued", "id", "pid"}
                     {"event": "exited", "id", "pid", "code"}        (code < 0: minus the signal's number)
                     {"event": "error", "id", "detail"}              (a request that could not be carried out)

Children run in sessions of their own, write to ``output`` and die with the server (parent-death signal). What a child
started itself, and left in its process group, ends with it. When the agent is gone the server waits
``UNICRON_ORPHAN_GRACE_S`` and ends, and its children with it.
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

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    # Before torch and numpy are imported: their thread pools would not survive a fork.
    os.environ.setdefault(_variable, "1")

# torch.cuda.is_available() otherwise initialises CUDA, and no child could use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""

NICE_VARIABLE = "UNICRON_RANK_NICE"
"""Environment variable: how much less of a busy core ranks get than everything else (see nice(2))."""

STORE_BACKLOG = 1024
"""Connections that may wait to be accepted by a store: all ranks of a task connect at once."""


class ForkServer:
    """The server's loop: requests in, events out, children reaped when they end."""

    def __init__(self, agent: socket.socket) -> None:
        """Args: agent: the connected socket."""
        self._agent = agent
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, tuple[str, int]] = {}
        """pidfd -> (request id, pid)"""
        self._ports: dict[int, tuple[str, int]] = {}
        """Read end of a store's pipe -> (request id, pid)"""
        self._buffer = bytearray()
        self._attached = True
        self._signals, self._signalled = socket.socketpair()
        self._signals.setblocking(False)
        self._signalled.setblocking(False)

    def run(self) -> int:
        """Serve until told to exit, or until the grace without an agent has passed; return the exit code."""
        self._selector.register(self._agent, selectors.EVENT_READ)
        self._selector.register(self._signals, selectors.EVENT_READ)
        # A stop has no descriptor to poll; its SIGCHLD writes a byte here.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        self._emit(event="ready", pid=self._pid)
        try:
            return self._serve()
        finally:
            for _, pid in self._children.values():
                _kill_group(pid)

    def _serve(self) -> int:
        while True:
            timeout = None if self._attached else float(os.environ.get("UNICRON_ORPHAN_GRACE_S", "5"))
            ready = self._selector.select(timeout)
            if not ready and not self._attached:
                return 0
            for key, _ in ready:
                if key.fileobj is self._agent:
                    if not self._receive():
                        return 0
                elif key.fileobj is self._signals:
                    self._stops()
                elif key.fd in self._children:
                    self._reap(key.fd)
                elif key.fd in self._ports:
                    self._port(key.fd)

    def _emit(self, **event: Any) -> None:
        # The socket blocks: an agent that does not read is about to be lost anyhow. One that is gone is no error.
        with contextlib.suppress(OSError):
            self._agent.sendall(json.dumps(event).encode() + b"\n")

    def _receive(self) -> bool:
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
            request = json.loads(self._buffer[:end])
            del self._buffer[: end + 1]
            if request["do"] == "exit":
                return False
            try:
                self._handle(request)
            except (OSError, KeyError, ValueError) as err:
                self._emit(event="error", id=request.get("id", ""), detail=f"{type(err).__name__}: {err}")
        return True

    def _handle(self, request: dict[str, Any]) -> None:
        match request["do"]:
            case "fork":
                pid = self._fork(request, lambda: _train(request))
                self._emit(event="forked", id=request["id"], pid=pid)
            case "store":
                self._store(request)
            case unknown:
                raise ValueError(f"unknown request {unknown!r}")

    def _store(self, request: dict[str, Any]) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            pid = self._fork(request, lambda: _store(request["host"], writing), keep=writing)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._ports[reading] = (request["id"], pid)
        self._selector.register(reading, selectors.EVENT_READ)

    def _port(self, reading: int) -> None:
        # One short write: it arrives whole. Nothing arrives when the child died; then ``exited`` tells.
        text = os.read(reading, 64)
        self._selector.unregister(reading)
        os.close(reading)
        request_id, pid = self._ports.pop(reading)
        if text:
            self._emit(event="store", id=request_id, pid=pid, port=int(text))

    def _fork(self, request: dict[str, Any], work: Callable[[], int], keep: int = -1) -> int:
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        pid = os.fork()
        if pid == 0:
            self._child(request, work, output, keep)
        os.close(output)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (request["id"], pid)
        self._selector.register(pidfd, selectors.EVENT_READ)
        return pid

    def _child(self, request: dict[str, Any], work: Callable[[], int], output: int, keep: int) -> NoReturn:
        code = 1
        try:
            os.setsid()
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(1)  # the server ended before the signal was asked for
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for connection in (self._agent, self._signals, self._signalled):
                connection.close()
            for descriptor in (*self._children, *self._ports):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # kill -USR2 writes every thread's Python stack to the output: what does a hanging rank do?
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

    def _stops(self) -> None:
        """Tell which children were stopped, or went on, since the last time."""
        with contextlib.suppress(BlockingIOError):
            while self._signals.recv(4096):
                pass
        for pidfd, (request_id, pid) in list(self._children.items()):
            try:
                result = os.waitid(os.P_PIDFD, pidfd, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            except ChildProcessError:
                continue  # it has ended: its descriptor tells
            if result is not None:
                event = "stopped" if result.si_code == os.CLD_STOPPED else "continued"
                self._emit(event=event, id=request_id, pid=pid)

    def _reap(self, pidfd: int) -> None:
        if os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        # Not reaped yet: its pid, which is its group's number too, belongs to nobody else.
        _kill_group(self._children[pidfd][1])
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        assert result is not None
        self._selector.unregister(pidfd)
        os.close(pidfd)
        request_id, pid = self._children.pop(pidfd)
        for reading, (_, of) in list(self._ports.items()):
            if of == pid:
                self._port(reading)
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        self._emit(event="exited", id=request_id, pid=pid, code=code)


def _kill_group(pid: int) -> None:
    """Kill what a child that is not reaped yet started: it would go on computing, and hold memory and devices."""
    # No such group: the child ended before it had one. No permission: only what runs as another user is left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _train(request: dict[str, Any]) -> int:
    """Be a training process."""
    from unicron import spec, train

    os.nice(int(os.environ.get(NICE_VARIABLE, "0")))
    os.environ[spec.VARIABLE] = request["spec"]
    os.environ["UNICRON_TASK"] = request["task"]
    os.environ["UNICRON_WORKER"] = request["worker"]
    return train.child()


def _store(host: str, writing: int) -> int:
    """Be a rendezvous store until killed."""
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # Bound here: torch would listen on every interface.
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
    """Import what training processes need, once."""
    from unicron import megatron_cpu

    megatron_cpu.enable()
    megatron_cpu.write_checkpoints_in_process()
    from unicron import train

    train.imports()
    # What is imported stays: no collection in a child touches, and so copies, the parent's pages.
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
    # Ctrl-C is for the program the user started; it tells the agent, and the agent tells this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return ForkServer(agent).run()


if __name__ == "__main__":
    sys.exit(main())
