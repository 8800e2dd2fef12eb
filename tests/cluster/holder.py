"""The first process of a machine: makes the machine's namespaces, and starts processes in them as it is asked to.

A program (``python -m tests.cluster.holder CONFIG FD``), controlled over a channel by ``machine.Machine``. It ends with
the test process, however that ends. As it is the first process of a PID namespace, the kernel then ends every process
of the machine, and with the last process all its namespaces, mounts and devices go.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import pwd
import selectors
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

from pyroute2 import IPRoute

from tests.cluster import channel

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
"""Kinds of namespaces, from ``linux/sched.h``; the module ``os`` has them from Python 3.12 on."""

MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18
"""Flags of ``mount(2)``, from ``linux/mount.h``."""

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
"""The ioctl that makes a device, the kind of device, and no header before its frames; from ``linux/if_tun.h``."""

INTERFACE = "eth0"
"""Each machine's interface."""

MTU_BYTES = 9000
"""Jumbo frames, as in networks for training; the fewer frames, the less work for the switch."""

DISK = "/run"
"""The machine's disk is mounted here: every Linux machine has this folder, and nothing in it concerns a test."""

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(kinds: int) -> None:
    """Put this process into new namespaces.

    Raises:
        OSError: the kernel refuses.
    """
    _check(_libc.unshare(kinds), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system.

    Raises:
        OSError: the kernel refuses.
    """
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(_libc.mount(*arguments), f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def make_mounts(config: channel.Message) -> None:
    """Give the machine its own /proc, hosts file, memory folder and disk; nothing of it is seen outside."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc")
    mount("tmpfs", "/dev/shm", "tmpfs", options=f"size={config['memory_bytes']},mode=1777")
    # Bound before the disk, whose folder may be where the link /etc/hosts points to.
    mount(config["hosts"], "/etc/hosts", flags=MS_BIND)
    mount("tmpfs", DISK, "tmpfs", options=f"size={config['disk_bytes']},mode=755")


def make_device(config: channel.Message) -> int:
    """Make the machine's interface; return the TAP device's file descriptor, with which the interface vanishes."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), IFF_TAP | IFF_NO_PI))
    no_ipv6 = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")
    if no_ipv6.exists():
        no_ipv6.write_text("1")  # otherwise the machine announces itself with addresses that nobody gave it
    with IPRoute() as routes:
        loopback = routes.link_lookup(ifname="lo")[0]
        routes.link("set", index=loopback, state="up")
        interface = routes.link_lookup(ifname=INTERFACE)[0]
        routes.link("set", index=interface, address=config["ethernet"], mtu=MTU_BYTES)
        routes.addr("add", index=interface, address=config["address"], prefixlen=config["prefix_length"])
        routes.link("set", index=interface, state="up")
    return fd


def not_root() -> None:
    """Let this process have another number than root's, and root's rights to files all the same.

    PostgreSQL refuses to run as root, and another user could not read a virtual environment that is root's alone.
    """
    user = pwd.getpwnam("nobody").pw_uid
    unshare(CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} 0 1")
    Path("/proc/self/gid_map").write_text(f"{user} 0 1")


class Holder:
    """Starts processes, signals them, reports their ends."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        """Serve until the other end of the channel is closed."""
        wakes, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(wakes, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == wakes:
                    os.read(wakes, 4096)
                    self._reap()
                    continue
                try:
                    request, _fds = channel.receive(self._control)
                except EOFError:
                    return
                channel.send(self._control, self._answer(request))

    def _answer(self, request: channel.Message) -> channel.Message:
        try:
            if request["op"] == "start":
                return {"pid": self._start(request)}
            os.kill(request["pid"], request["signal"])
        except OSError as err:
            return {"error": str(err)}
        return {"done": True}

    def _start(self, request: channel.Message) -> int:
        with open(request["output"], "ab") as output:
            process = subprocess.Popen(
                request["command"],
                env=request["environment"],
                cwd=DISK,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=not_root if request["not_root"] else None,
            )
        self._started[process.pid] = process
        return process.pid

    def _reap(self) -> None:
        """Report the ends of started processes. Orphans, which come to a first process too, are forgotten."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            process = self._started.pop(pid, None)
            if process is not None:
                process.returncode = os.waitstatus_to_exitcode(status)
                channel.send(self._control, {"ended": pid, "code": process.returncode})


def main() -> int:
    """Be a machine's first process, or the process that waits for it."""
    config, control = json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET)
    first = os.fork()  # only a child is in the new PID namespace
    if first:
        control.close()
        os.waitpid(first, 0)
        return 0
    pid = int(os.readlink("/proc/self"))  # as it is seen outside, since /proc is still the outside's
    make_mounts(config)
    socket.sethostname(config["hostname"])
    device = make_device(config)
    channel.send(control, {"ready": pid}, [device])
    os.close(device)
    Holder(control).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
