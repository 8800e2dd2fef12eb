"""What an exception, an exit code, or the last output of a process says about its cause.

The first entry of ``CLASSES`` that matches counts: the most specific come first. The raw text stays in the evidence.
A failure of the device itself has the kind ``device``, of SEV1 (Unicron paper, table 1): the program is not to blame,
and would meet it again on the same device. All other classes are for the reader of the incident.

Texts are those of ``cudaGetErrorString`` (CUDA runtime API, ``cudaError_t``), ``ncclGetErrorString`` (NCCL,
``ncclResult_t``), ``cublasGetStatusName``, glibc's ``strerror``, and of torch 2.13's and gloo's own errors.
"""

from __future__ import annotations

import re
import signal
from typing import NamedTuple


class ErrorClass(NamedTuple):
    """A class of errors.

    Attributes:
        name: a stable name, for readers and for filters.
        pattern: matches a part of the text; None: no text shows the class.
        advice: what to look at, or to do.
        is_device: whether the device itself has failed.
    """

    name: str
    pattern: re.Pattern[str] | None
    advice: str
    is_device: bool = False


def _of(name: str, pattern: str, advice: str, *, is_device: bool = False) -> ErrorClass:
    return ErrorClass(name, re.compile(pattern, re.IGNORECASE), advice, is_device)


_DEVICE = "the node is isolated; look at the driver's Xid messages (dmesg) and at nvidia-smi -q"
_PROGRAM = "an error of the program, or of a library that it uses; CUDA_LAUNCH_BLOCKING=1 names the kernel"

CLASSES = (
    _of("gpu-ecc", r"uncorrectable ECC error", _DEVICE, is_device=True),
    _of("gpu-nvlink", r"uncorrectable NVLink error", _DEVICE, is_device=True),
    _of("gpu-lost", r"fallen off the bus|GPU is lost", _DEVICE, is_device=True),
    _of(
        "gpu-missing",
        r"no CUDA-capable device is detected|No CUDA GPUs are available|device\(s\) is/are busy or unavailable",
        "the driver shows no usable device to the process: nvidia-smi on the node",
        is_device=True,
    ),
    _of(
        "gpu-fabric",
        r"CUDA error: system not yet initialized",
        "NVSwitch machines need nvidia-fabricmanager: systemctl status nvidia-fabricmanager",
        is_device=True,
    ),
    _of(
        "gpu-driver",
        r"unsupported display driver / cuda driver combination|CUDA driver version is insufficient",
        "the node's driver is older than the program's CUDA",
        is_device=True,
    ),
    _of("gpu-illegal-access", r"an illegal memory access was encountered|misaligned address", _PROGRAM),
    _of("gpu-assert", r"device-side assert triggered", _PROGRAM),
    _of("gpu-launch", r"unspecified launch failure|the launch timed out|illegal instruction was encountered", _PROGRAM),
    _of(
        "gpu-out-of-memory",
        r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "the model, its activations or other processes fill the device: smaller micro-batches, recomputation, more "
        "model parallelism",
    ),
    _of("cublas", r"CUBLAS_STATUS_\w+", _PROGRAM),
    _of("cudnn", r"CUDNN_STATUS_\w+", _PROGRAM),
    _of("nccl-usage", r"ncclInvalidUsage|ncclInvalidArgument", "ranks disagree about a collective, or share a device"),
    _of("nccl-remote", r"ncclRemoteError", "a peer ended or its network failed: look at the other ranks first"),
    _of("nccl-system", r"ncclSystemError", "a system call failed under NCCL: NCCL_DEBUG=WARN names it"),
    _of("nccl", r"NCCL error|ncclUnhandledCudaError|ncclInternalError", "NCCL_DEBUG=WARN says more"),
    _of(
        "open-files",
        r"Too many open files",
        "the process may open no more files and sockets: raise the limit (systemd: LimitNOFILE=65536, docker: --ulimit "
        "nofile, shell: ulimit -n) and start the agent again; unicron doctor shows it",
    ),
    _of(
        "threads",
        r"can't start new thread|Resource temporarily unavailable|pthread_create failed",
        "the user or the control group may have no more threads: raise the limit (systemd: TasksMax, docker: "
        "--pids-limit, shell: ulimit -u) and start the agent again; unicron doctor shows it",
    ),
    _of(
        "ports",
        r"Address already in use",
        "a port that the process needs is taken: look for what listens there (ss -ltnp), and at "
        "net.ipv4.ip_local_port_range",
    ),
    _of(
        "collective-timeout",
        r"Timed out waiting \d+ms for|Watchdog caught collective operation timeout",
        "a rank did not come: the others' stacks say which",
    ),
    _of(
        "collective-mismatch",
        r"distributed collective mismatch in your code",
        "ranks were in different collectives, such as one that stands under `if rank == 0`: all ranks have to come to "
        "the same ones in the same order, and those of the script belong in a step's block or in run.boundary()",
    ),
    _of("gloo", r"gloo/transport|\[gloo\]|Gloo ", "a peer ended or its network failed: look at the other ranks first"),
    _of(
        "rendezvous",
        r"client socket has (timed out|failed to connect)|DistStoreError|DistNetworkError",
        "the store of the generation could not be reached: unicron doctor on both nodes",
    ),
    _of("cuda", r"CUDA error|CUDA driver error", _PROGRAM),
    _of(
        "shared-memory-full",
        r"insufficient shared memory|unable to (mmap|write to file) .*(/torch_|shm)|No space left on device.*/dev/shm",
        '/dev/shm is full: a larger one (docs/deploy.md, "Data")',
    ),
    _of(
        "host-out-of-memory",
        r"can't allocate memory|Cannot allocate memory|\bMemoryError\b|std::bad_alloc|DefaultCPUAllocator",
        "the host's memory, or the limit of its control group, is used up",
    ),
    _of("disk-full", r"No space left on device|Disk quota exceeded", "free some of the disk, or raise the quota"),
    _of(
        "storage",
        r"Input/output error|Stale file handle|Read-only file system|Transport endpoint is not connected",
        "the storage that the program uses is broken or gone",
    ),
    _of(
        "network",
        r"Connection (refused|reset|timed out|aborted)|No route to host|Network is unreachable|Broken pipe"
        r"|Temporary failure in name resolution|Name or service not known",
        "the program could not reach another machine",
    ),
    _of(
        "data-worker",
        r"DataLoader worker .*(exited unexpectedly|is killed by signal)",
        "a process that loads data ended: its own output, and the host's memory",
    ),
    _of("data", r"\bUnicodeDecodeError\b|\bEOFError\b|\bzlib\.error\b|\bJSONDecodeError\b", "damaged or cut data"),
    _of(
        "heap-corruption",
        r"double free or corruption|free\(\): invalid|corrupted (size|double-linked)|malloc\(\): ",
        "native code writes where it may not: an extension, or a library of another version",
    ),
    _of("segfault", r"Segmentation fault", "native code failed; the evidence has the Python stacks at that moment"),
    _of("bus-error", r"Bus error", "mapped memory ran out, or a mapped file was cut: often /dev/shm is full"),
    _of(
        "illegal-instruction",
        r"Illegal instruction",
        "a library was built for another processor than this node's",
    ),
    _of("arithmetic", r"Floating[- ]point exception", "native code divided an integer by zero"),
    _of("abort", r"terminate called|Fatal Python error: Aborted", "native code gave up; its last words are the output"),
)
"""All classes, the most specific first."""

OOM_KILLED = ErrorClass(
    "oom-killed",
    None,
    "the kernel ended the process since memory was used up: the limit of the container or of the control group, or the "
    "machine's memory; dmesg names what was the largest",
)
"""The class of a process that the kernel ended for memory, which its agent has found out."""

_BY_NAME = {one.name: one for one in CLASSES}

SIGNALS = {
    "SIGSEGV": _BY_NAME["segfault"],
    "SIGBUS": _BY_NAME["bus-error"],
    "SIGABRT": _BY_NAME["abort"],
    "SIGILL": _BY_NAME["illegal-instruction"],
    "SIGFPE": _BY_NAME["arithmetic"],
}
"""The class of a process that a signal ended and whose output has none."""

FROM_OUTSIDE = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"})
"""Signals by which others end a process: what the process has printed before is not the cause."""


def class_of(text: str) -> ErrorClass | None:
    """Return the class of an error by its text; None: it has no class, as most exceptions of a program have none.

    Args:
        text: name and message of an exception, or the last output of a process.
    """
    return next((one for one in CLASSES if one.pattern is not None and one.pattern.search(text)), None)


def class_of_exit(name: str, output: str, *, oom_killed: bool) -> ErrorClass | None:
    """Return the class of a process that has ended; None: it has no class.

    Args:
        name: of its exit status: a signal's, or ``exit N``.
        output: the end of what it printed.
        oom_killed: whether the kernel ended it for memory.
    """
    if oom_killed:
        return OOM_KILLED
    if name in FROM_OUTSIDE:
        return None
    return class_of(output) or SIGNALS.get(name)


OWN_EXITS = {
    75: "its node agent did not come back",
    76: "its node agent does not read its protocol version",
    77: "its communicators could not be aborted in time",
}
"""Meanings of the exit codes with which the library ends a training process (``unicron.link.agent_link``,
``unicron.join.groups``)."""


def exit_name(exit_code: int) -> str:
    """Return the name of an exit code: ``SIGKILL`` for -9, ``exit 1`` for 1, and with its meaning if it is our own."""
    if exit_code >= 0:
        meaning = OWN_EXITS.get(exit_code)
        return f"exit {exit_code}: {meaning}" if meaning else f"exit {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
