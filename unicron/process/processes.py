"""Requests of the fork server to the kernel, for itself and its children."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import struct
import threading

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
"""Options of ``prctl(2)`` (linux/prctl.h)."""

_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: pid, uid, gid (unix(7))."""

_left_above: list[signal.Signals] = []
"""The signals that this process leaves to a program above."""

_masks = threading.local()
"""``before``: the signals that the thread which forks blocked before."""


def end_with_parent(parent: int, number: signal.Signals) -> bool:
    """Have the kernel send a signal to this process when its parent ends; return whether the parent lives.

    Args:
        parent: the parent's pid. No signal comes for one that ended before this call.
        number: the signal.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def take_sigterm() -> None:
    """Do nothing on SIGTERM from now on where it is blocked; return at once elsewhere.

    It is blocked below a program that wants to end all of this itself, and SIGTERM may go to all processes at once
    (``shared.machine.process``). A handler, since a blocked or ignored signal would stay so in processes of the user's
    code, whose parent may end them with SIGTERM (``multiprocessing`` does). A program that is started has no handler; a
    forked child here loses it. A SIGTERM that a child gets before that waits until then: Python drops those that come
    between a fork and its own first steps in the child.
    """
    if signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return
    _left_above.append(signal.SIGTERM)
    signal.signal(signal.SIGTERM, _leave)
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_forget)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def leaves_sigterm() -> bool:
    """Return whether SIGTERM is for a program above, whatever handler the user's code has set since."""
    return bool(_left_above)


def _leave(*_: object) -> None:
    """Leave a signal to a program above."""


def _block() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _forget() -> None:
    _left_above.clear()
    if signal.getsignal(signal.SIGTERM) is _leave:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock()


def become(uid: int) -> None:
    """Run this process, whose user is root, as another user for good: alone in the group of the same number.

    No program that it starts gets back any right (``no_new_privs``). A process that changes its user loses its
    parent-death signal, so ``end_with_parent`` comes afterwards; and the kernel makes it undumpable, as if it kept
    secrets of root. The fork server has no secrets, and NCCL exchanges descriptors between the processes of one user,
    which needs a dumpable process.

    Raises:
        OSError: this process may not change its user.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process at the other end of a Unix socket, as it was when it connected: its pid and its user id."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return int(pid), int(uid)


def belongs_to(pid: int, parent: int) -> bool:
    """Return whether a process is a child of another one, or that one itself; False for one that has ended.

    Where ``/proc`` does not show other processes (``hidepid``), every living process counts as one.
    """
    if pid == parent:
        return True
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name of the program, in brackets, may contain anything.
            return int(file.read().rpartition(")")[2].split()[1]) == parent
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def kill_group(pid: int) -> None:
    """Kill the process group of a child that is not reaped yet: its processes would go on using memory and devices."""
    # No such group: the child ended before it had one. No permission: only processes of another user are left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def redirect(output: int) -> None:
    """Redirect standard input to nothing, and standard output and error to ``output``."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def write_stacks(path: str | None) -> int:
    """Have the main thread's Python stack written on SIGUSR2, and those of all before a fatal signal ends the process.

    The stacks of other threads are not read on SIGUSR2: that ends the process if one of them runs
    (``unicron.link.stacks``). Fatal signals are SIGSEGV, SIGBUS, SIGABRT, SIGFPE and SIGILL. Both handlers are C code
    that takes no lock and no memory, so they also work where Python hangs with the GIL taken, and in a process whose
    heap is damaged. From Python 3.14 on the second one writes native frames as well. Torch's own handler does before
    that, but allocates memory: a process with a damaged heap never ended in it (torch 2.13, measured).

    Args:
        path: the file to write to; if it is None or cannot be written, standard error is used. Open it before the
            process changes its user, since it belongs to the node agent, which empties and reads it.

    Returns:
        The file's descriptor.
    """
    descriptor = 2
    if path is not None:
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
    write_stacks_to(descriptor)
    return descriptor


def write_stacks_to(descriptor: int) -> None:
    """Do as ``write_stacks``, with a file that is open."""
    faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=False)
    faulthandler.enable(file=descriptor, all_threads=True)
