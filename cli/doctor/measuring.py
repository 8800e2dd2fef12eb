"""The measuring of ``unicron doctor``: what this machine, NATS, the peers and the storage show. Judges nothing."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import pwd
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cli.doctor import between_nodes
from cli.doctor.measured import DeviceFacts, Devices, Facts, Nats, RankPython, Storage
from cli.doctor.shared_memory import clearers
from services.agent.files.rank_users import RankUsers
from services.agent.machine import address, hardware
from services.agent.machine.device_health import DeviceHealth, lasting_faults
from services.agent.machine.hardware import CPU, VISIBLE_VARIABLE
from shared.bus.connection import Bus
from shared.errors import UnicronError
from shared.events.device_faults import device_fault
from shared.machine import process_limits
from shared.names import is_name
from shared.service.joining import credential_of, joined
from shared.settings.model import Settings

CONNECT_S = 5.0
"""Time for the connection to NATS; a server that runs answers in milliseconds, over a slow link in a second."""

STORED_BYTES = 64 << 20
"""Size of the file that the storage takes: enough for a rate, and a second on 64 MB/s."""

_TIME_ERROR = 5
"""What adjtimex(2) returns where the clock is not synchronised."""

_TIMEX_BYTES = 512
"""Room for ``struct timex``, which has 208 bytes."""


async def measure(settings: Settings, peers: Sequence[str], state_bytes: int | None) -> Facts:
    """Measure this node.

    Args:
        settings: of its agent.
        peers: ``HOST:PORT`` of each node on which ``unicron doctor --listen`` runs.
        state_bytes: model and optimizer state of the node's workers, if it is known.

    Raises:
        InvalidInput: an address is none, or the credential cannot be used.
    """
    for peer in peers:
        between_nodes.address_of(peer)
    nats, local, server = None, "", ""
    if settings.nats_credential is not None or settings.nats_credential_fd is not None:
        credential = credential_of(settings)
        settings = joined(settings, credential)
        nats, local, server = await _nats(settings, credential)
    found = [await between_nodes.measure(peer) for peer in peers]  # one by one: they share this node's link
    storage = await asyncio.to_thread(_storage, settings)
    pythons = await rank_pythons(settings)
    host_name = socket.gethostname()
    node_address = _address(settings, local, server)
    run_dir = settings.run_dir.resolve()
    output_bytes = settings.rank_output_bytes * settings.rank_output_files * settings.workers_per_node
    memory = shutil.disk_usage(_present(settings.memory_dir))
    users = RankUsers(settings.rank_uids)
    process_limits.raise_open_files()  # as an agent does
    limits = process_limits.of_this_process()
    return Facts(
        node=settings.node,
        name_problem="" if is_name(settings.node) else f"the host name gives no node name: {settings.node!r}",
        host_name=host_name,
        host_addresses=_host_addresses(host_name),
        **node_address,
        clock_synchronised=_clock_synchronised(),
        memory_place=str(settings.memory_dir),
        memory_bytes=memory.total,
        memory_free_bytes=memory.free,
        memory_clearers=clearers(Path("/"), str(settings.memory_dir), os.geteuid(), _user()),
        state_bytes=state_bytes,
        open_files=limits.open_files,
        threads=limits.threads,
        ports=limits.ports,
        run_dir=str(run_dir),
        disk_free_bytes=shutil.disk_usage(_present(run_dir)).free,
        output_bytes=output_bytes,
        uid=os.geteuid(),
        separate_users=users.separate,
        rights_problem=_rights_problem(users, run_dir),
        workers=settings.workers_per_node,
        nats=nats,
        peers=found,
        versions=pythons[0].versions,
        pythons=pythons,
        devices=_devices(settings),
        storage=storage,
    )


def _user() -> str:
    """Return the name of this process's user; empty: it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""


def _devices(settings: Settings) -> Devices:
    """Return the devices that the node's agent would use; none if it is to use none."""
    if settings.hardware == CPU:
        return Devices()
    visible = os.environ.get(VISIBLE_VARIABLE)
    found = hardware.devices(visible)
    each = [
        DeviceFacts(
            entry=entry,
            name=device.name,
            memory_bytes=device.memory_bytes,
            memory_used_bytes=reading.memory_used_bytes,
            temperature_c=reading.temperature_c,
            utilisation_percent=reading.utilisation_percent,
            faults=[device_fault(fault).meaning for fault in sorted(lasting_faults(reading))],
            notes=DeviceHealth(reading).notes(),
        )
        for entry, device, reading in hardware.readings(visible)
    ]
    return Devices(names=list(found.names), driver=found.driver, problem=found.problem, each=each)


async def rank_pythons(settings: Settings) -> list[RankPython]:
    """Return what the Pythons say of themselves in which the node's ranks run. The first is that of most tasks.

    Its versions are those that all nodes of a task should have in common.
    """
    listed = settings.rank_interpreters
    return [await _rank_python(settings, path, listed=bool(listed)) for path in listed or [sys.executable]]


async def _rank_python(settings: Settings, path: str, *, listed: bool) -> RankPython:
    # As a task's user, if this is root as the agent has to be.
    uid = RankUsers(settings.rank_uids).uid("doctor") if os.geteuid() == 0 else None
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-P",
            "-m",
            "services.agent.machine.interpreters",
            path,
            *([] if uid is None else [str(uid)]),
        ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    if process.returncode:  # such as one without the library's messages, which the agent needs itself
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return RankPython(path=path, listed=listed, problem=f"the agent cannot run here: {last}")
    return RankPython.model_validate({"path": path, "listed": listed, **json.loads(out)})


async def _nats(settings: Settings, credential: Any) -> tuple[Nats, str, str]:
    """Return how NATS is reached, and the addresses of both ends of the connection."""
    servers = settings.nats_servers
    name = f"doctor-{settings.node}"
    try:
        bus = await Bus.connect(settings.nats_url, credential=credential, name=name, timeout_s=CONNECT_S)
    except UnicronError as err:
        return Nats(servers=servers, problem=err.detail), "", ""
    try:
        began_s = time.perf_counter()
        await bus.wait_connected()  # a PING and its PONG
        round_trip_s = time.perf_counter() - began_s
        return Nats(servers=servers, version=bus.server_version, round_trip_s=round_trip_s), *bus.addresses
    finally:
        await bus.close()


def _address(settings: Settings, local: str, server: str) -> dict[str, str]:
    if not (local or settings.address):
        return {"address": "", "interface": "", "address_problem": ""}
    try:
        found = address.find(settings, local, server)
    except UnicronError as err:
        return {"address": "", "interface": "", "address_problem": err.detail}
    return {"address": found.ip, "interface": found.interface, "address_problem": ""}


def _host_addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({address.plain(str(one[4][0])) for one in found})


def _clock_synchronised() -> bool | None:
    """Return what the kernel says of its clock; None where it does not say."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else bool(state != _TIME_ERROR)


def _present(path: Path) -> Path:
    """Return a folder, or the nearest one above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _rights_problem(users: RankUsers, run_dir: Path) -> str:
    try:
        users.check(run_dir)
    except UnicronError as err:
        return err.detail
    return ""


def _storage(settings: Settings) -> Storage:
    """Write, rename, read back and delete a file where checkpoints go."""
    name, content = f".doctor-{uuid.uuid4().hex}", os.urandom(STORED_BYTES)
    place = settings.checkpoint_url or str(settings.run_dir.resolve())
    try:
        store = _in_store if settings.checkpoint_url else _in_folder
        write_s, read_s, same = store(place, name, content)
    except Exception as err:  # clients of object stores have errors of their own
        return Storage(place=place, problem=f"{type(err).__name__}: {err}")
    if not same:
        return Storage(place=place, problem="a file does not read as it was written")
    return Storage(
        place=place,
        shared=bool(settings.checkpoint_url),
        write_bytes_per_s=len(content) / write_s,
        read_bytes_per_s=len(content) / read_s,
    )


def _in_folder(place: str, name: str, content: bytes) -> tuple[float, float, bool]:
    folder = Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    partial, path = folder / f"{name}.partial", folder / name
    try:
        began_s = time.perf_counter()
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            written_s = time.perf_counter()
            with contextlib.suppress(OSError):  # else the page cache is read; not every file system can
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        partial.replace(path)
        read_from_s = time.perf_counter()
        same = path.read_bytes() == content
        return written_s - began_s, time.perf_counter() - read_from_s, same
    finally:
        partial.unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def _in_store(place: str, name: str, content: bytes) -> tuple[float, float, bool]:
    import fsspec

    fs, root = fsspec.core.url_to_fs(place, use_listings_cache=False)
    path = f"{root.rstrip('/')}/{name}"
    try:
        fs.makedirs(root, exist_ok=True)
        began_s = time.perf_counter()
        fs.pipe_file(path, content)
        written_s = time.perf_counter()
        same = fs.cat_file(path) == content
        return written_s - began_s, time.perf_counter() - written_s, same
    finally:
        with contextlib.suppress(OSError):
            fs.rm(path)
