"""What a process lacks where its own call failed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from unicron.errors import CommunicationFailed
from unicron.link import lacks, reporting
from unicron.link.lacks import lack_of
from unicron.protocol.messages import Raised

GLOO = "[enforce fail at gloo/transport/tcp/socket.cc:24] rv != -1. -1 vs -1. socket: "

IN_PROCESS = """
import json, os, resource, sys, threading
from unicron.link.lacks import lack_of
from unicron.link import reporting
import torch.distributed as dist

def files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = []
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))

def groups():
    # Every descriptor is taken before gloo asks for its sockets.
    store = dist.HashStore()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = []
    try:
        while True:
            kept.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.new_group([0])

def refused_groups():
    from unicron.join.groups import make
    from unicron.link.lacks import need_open_files
    from unicron.protocol.messages import Configure

    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 64))
    need_open_files(30, "a test")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (64, 64)
    make(Configure(generation=1, stage="boundary", rank=0, world_size=100, tensor=1, pipeline=1,
                   store_host="127.0.0.1", store_port=1, members=[]), None)

try:
    globals()[sys.argv[1]]()
except Exception as error:
    found = lack_of(error)
    said = [type(error).__name__, found and found.resource, found and found.limit, reporting.kind(error)]
    print(json.dumps(said), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("error", "resource"),
    [
        (OSError(errno.EMFILE, "Too many open files"), lacks.OPEN_FILES),
        (OSError(errno.ENFILE, "Too many open files in system"), lacks.MACHINE_FILES),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), lacks.MEMORY),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), lacks.THREADS),
        (OSError(errno.EADDRINUSE, "Address already in use"), lacks.PORTS),
        (MemoryError(), lacks.MEMORY),
        (RuntimeError("can't start new thread"), lacks.THREADS),
        (RuntimeError(f"{GLOO}Too many open files"), lacks.OPEN_FILES),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), lacks.MEMORY),
        (dist.DistNetworkError("The server socket has failed to listen: EADDRINUSE"), lacks.PORTS),
        (ImportError("libx.so: cannot open shared object file: Too many open files"), lacks.OPEN_FILES),
    ],
)
def test_a_call_of_its_own_that_failed_says_what_the_process_lacks(error: BaseException, resource: str) -> None:
    found = lack_of(error)
    assert found is not None
    assert found.resource == resource
    assert not reporting.is_communication(error)
    assert reporting.kind(error, starting=True) == "exception"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"{GLOO}Connection refused"),
        RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234"),
        CommunicationFailed("a peer was lost"),
        dist.DistBackendError("a peer was lost"),
    ],
)
def test_a_lost_peer_is_no_lack(error: BaseException) -> None:
    assert lack_of(error) is None
    assert reporting.is_communication(error)


@pytest.mark.parametrize("supervised", [True, False])
def test_a_lost_peer_is_one_line_of_the_output_where_a_new_generation_answers(
    supervised: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[Raised] = []
    link: Any = SimpleNamespace(supervised=supervised, generation=2, rank=0, send=sent.append)
    reporting.report(link, RuntimeError(f"{GLOO}Connection closed by peer"), step=118)
    printed = capsys.readouterr().err
    if supervised:
        assert printed == "unicron: step 118 was broken off, and comes again: a peer is gone\n"
    else:
        assert "Connection closed by peer" in printed
    assert (sent[0].kind, "Connection closed by peer" in sent[0].traceback) == ("communication", True)
    reporting.report(link, ValueError("the script's"), step=118)
    assert "ValueError: the script's" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Too many open files are what this text is about"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/data"),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB; can't allocate memory"),
    ],
)
def test_other_errors_show_no_lack(error: BaseException) -> None:
    assert lack_of(error) is None


def test_what_an_error_follows_from_counts() -> None:
    try:
        try:
            raise OSError(errno.EMFILE, "Too many open files")
        except OSError as err:
            raise RuntimeError("the groups cannot be made") from err
    except RuntimeError as err:
        found = lack_of(err)
    assert found is not None
    assert found.resource == lacks.OPEN_FILES
    assert "(RLIMIT_NOFILE)" in found.limit


def test_a_full_file_system_is_named(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there"
    found = lack_of(OSError(errno.ENOSPC, "No space left on device", str(path)))
    assert found is not None
    size = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert f"of {size} bytes free below {tmp_path}" in found.limit


@pytest.mark.slow
@pytest.mark.parametrize("what", ["files", "refused_groups", "groups"])
def test_a_process_without_descriptors_says_so_although_it_can_open_nothing(what: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", IN_PROCESS, what], capture_output=True, text=True, timeout=60, check=True
    )
    error, resource, limit, kind = json.loads(run.stdout)
    assert error in ("OSError", "RuntimeError")
    assert (resource, limit, kind) == ("open files", "64 at most (RLIMIT_NOFILE)", "exception")
