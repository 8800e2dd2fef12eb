"""The judgement of ``unicron doctor``: facts of a node to findings, each with what to do. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from cli.doctor.measured import RANK_PACKAGES, DeviceFacts, Facts, Peer, RankPython
from shared.machine.process_limits import ProcessLimits, judged

STATE_COPIES = 8
"""In-memory copies take this many times the state of a node's workers (docs/deploy.md, "Data")."""

CONTAINER_MEMORY_BYTES = 64 << 20
"""``/dev/shm`` of a container to which nobody gave more: no model has room for its copies there."""

OFFSET_S = 5.0
"""Difference of two clocks that shows that one follows no time server: those that do differ by milliseconds. Durations
and costs stay right with any; certificates and object stores need the time of day."""

REFUSED_OFFSET_S = 900.0
"""Difference from which S3 refuses requests."""

ROUND_TRIP_S = 0.1
"""Round trip to NATS or a peer from which heartbeats and probes (1 s for two of them and a turn of the agent) have
little room for a busy network."""

BANDWIDTH_BYTES_PER_S = 100e6
"""A link of 1 Gbit/s gives 117 MB/s. With less, a gigabyte of state is more than ten seconds on its way to a peer."""

SLOW_PAIR = 0.5
"""Part of the median of all pairs below which one pair is slow: links of one kind differ by less."""

STORAGE_BYTES_PER_S = 50e6
"""A gigabyte of state takes 20 s then. The planner assumes 1e9 until it has measured (UNICRON_STORAGE_BYTES_PER_S)."""

DISK_BYTES = 256 << 20
"""Free space without which a node's own files (records, output of its first ranks) may have no room."""


class Verdict(StrEnum):
    """How a finding is to be taken."""

    OK = "ok"
    WARNING = "warning"
    """The node works, and worse than it could."""
    FAILED = "failed"
    """The node cannot join, or cannot run or save a task."""


class Finding(NamedTuple):
    """The result of a check. ``advice``: what to do; empty if nothing is to be done."""

    check: str
    verdict: Verdict
    finding: str
    advice: str = ""


def findings(facts: Facts) -> list[Finding]:
    """Return what the facts show, check by check."""
    return [
        clock(facts),
        memory(facts),
        disk(facts),
        *limits(facts),
        name(facts),
        address(facts),
        nats(facts),
        *peers(facts.peers),
        *(python(one) for one in facts.pythons),
        *versions(facts),
        devices(facts),
        *each_device(facts.devices.each),
        *storage(facts),
        rights(facts),
    ]


def clock(facts: Facts) -> Finding:
    """Judge the clock by the kernel's word, and by those of the peers."""
    advice = "start a time service (chrony, systemd-timesyncd), on the peer as well if its clock is the wrong one"
    offsets = {peer.peer: peer.offset_s for peer in facts.peers if not peer.problem}
    far = max(offsets, key=lambda peer: abs(offsets[peer]), default="")
    if far and abs(offsets[far]) >= OFFSET_S:
        verdict = Verdict.FAILED if abs(offsets[far]) >= REFUSED_OFFSET_S else Verdict.WARNING
        way = "ahead" if offsets[far] > 0 else "behind"
        return Finding("clock", verdict, f"the clock of {far} is {abs(offsets[far]):.1f} s {way}", advice)
    if facts.clock_synchronised is False:
        return Finding("clock", Verdict.WARNING, "the kernel says that the clock is not synchronised", advice)
    said = "synchronised" if facts.clock_synchronised else "the kernel does not say whether it is synchronised"
    compared = f", within {abs(offsets[far]) * 1e3:.0f} ms of {len(offsets)} peers" if far else ""
    return Finding("clock", Verdict.OK, f"{said}{compared}")


def memory(facts: Facts) -> Finding:
    """Judge the room for in-memory copies."""
    if facts.memory_clearers:
        cleared = f"{facts.memory_place} is cleared while tasks train: {'; '.join(facts.memory_clearers)}"
        keep = (
            "set RemoveIPC=no in /etc/systemd/logind.conf, or `loginctl enable-linger` for the user; exempt the "
            f"folders from tmpfiles.d: 'x {facts.memory_place}/unicron-*'; without copies a fault costs more steps"
        )
        return Finding("memory", Verdict.WARNING, cleared, keep)
    what = f"{facts.memory_place} has {_size(facts.memory_bytes)}, {_size(facts.memory_free_bytes)} free"
    advice = (
        f"give it {STATE_COPIES} times the model and optimizer state of the node's workers (docker: --shm-size, pod: "
        "an emptyDir in memory, machine: mount -o remount,size=); without it a fault goes back to the last checkpoint"
    )
    if facts.state_bytes is not None:
        needed = STATE_COPIES * facts.state_bytes
        if facts.memory_free_bytes < needed:
            return Finding("memory", Verdict.WARNING, f"{what}; copies need {_size(needed)}", advice)
        return Finding("memory", Verdict.OK, f"{what}; copies need {_size(needed)}")
    if facts.memory_bytes <= CONTAINER_MEMORY_BYTES:
        return Finding("memory", Verdict.WARNING, f"{what}: what a container has by itself", advice)
    return Finding("memory", Verdict.OK, f"{what}: for a state of {_size(facts.memory_free_bytes // STATE_COPIES)}")


def disk(facts: Facts) -> Finding:
    """Judge the room in the run directory."""
    what = f"{facts.run_dir} has {_size(facts.disk_free_bytes)} free"
    advice = "make room, or set UNICRON_RUN_DIR, UNICRON_RANK_OUTPUT_BYTES or UNICRON_RANK_OUTPUT_FILES"
    if facts.disk_free_bytes < DISK_BYTES:
        return Finding("disk", Verdict.FAILED, what, advice)
    if facts.disk_free_bytes < facts.output_bytes:
        return Finding(
            "disk", Verdict.WARNING, f"{what}; ranks of one task may leave {_size(facts.output_bytes)}", advice
        )
    return Finding("disk", Verdict.OK, what)


def limits(facts: Facts) -> Iterator[Finding]:
    """Judge how many open files, threads and ports ranks may have."""
    own = ProcessLimits(facts.open_files, facts.threads, facts.ports)
    for resource, what, advice in judged(own, facts.workers):
        yield Finding(resource, Verdict.WARNING if advice else Verdict.OK, what, advice)


def name(facts: Facts) -> Finding:
    """Judge the node's name, and what the host name stands for."""
    if facts.name_problem:
        return Finding("name", Verdict.FAILED, facts.name_problem, "set UNICRON_NODE")
    if not facts.host_addresses:
        return Finding(
            "name",
            Verdict.WARNING,
            f"{facts.node}; the host name {facts.host_name} cannot be resolved here",
            "add it to DNS or /etc/hosts: libraries in scripts of users may resolve it",
        )
    if all(ipaddress.ip_address(ip).is_loopback for ip in facts.host_addresses):
        return Finding(
            "name",
            Verdict.OK,
            f"{facts.node}; {facts.host_name} is a loopback address here, of which Unicron makes no use",
        )
    return Finding("name", Verdict.OK, f"{facts.node}; {facts.host_name} is {', '.join(facts.host_addresses)}")


def address(facts: Facts) -> Finding:
    """Judge the address under which peers reach the node."""
    if facts.address_problem:
        return Finding("address", Verdict.FAILED, facts.address_problem, "set UNICRON_ADDRESS")
    if not facts.address:
        return Finding(
            "address", Verdict.WARNING, "not known without NATS or UNICRON_ADDRESS", "give the credential of the node"
        )
    what = f"{facts.address} on {facts.interface}, which gloo and NCCL use"
    if ipaddress.ip_address(facts.address).is_loopback:
        return Finding(
            "address", Verdict.WARNING, f"{what}: nodes on other machines cannot reach it", "set UNICRON_ADDRESS"
        )
    return Finding("address", Verdict.OK, what)


def nats(facts: Facts) -> Finding:
    """Judge the way to NATS."""
    if facts.nats is None:
        return Finding(
            "NATS", Verdict.WARNING, "not tried: no credential", "set UNICRON_NATS_CREDENTIAL (unicron node add)"
        )
    servers = ", ".join(facts.nats.servers)
    if facts.nats.problem:
        return Finding(
            "NATS",
            Verdict.FAILED,
            f"{servers}: {facts.nats.problem}",
            "check that it runs, UNICRON_NATS_URL, routes and firewalls (port 4222), and that the credential is known",
        )
    what = f"{servers} answers in {facts.nats.round_trip_s * 1e3:.1f} ms, version {facts.nats.version}"
    if facts.nats.round_trip_s > ROUND_TRIP_S:
        return Finding("NATS", Verdict.WARNING, what, "look at the network: heartbeats may come too late")
    return Finding("NATS", Verdict.OK, what)


def peers(found: Iterable[Peer]) -> Iterator[Finding]:
    """Judge the way to each peer, and the rate in both directions beside that of the other pairs."""
    found = list(found)
    usual = median([_rate(peer) for peer in found if not peer.problem] or [0.0])
    for peer in found:
        check = f"peer {peer.peer}"
        if peer.problem:
            yield Finding(
                check,
                Verdict.FAILED,
                peer.problem,
                "check that `unicron doctor --listen` runs there, and routes and firewalls between the two nodes: "
                "nodes reach one another on any TCP port",
            )
            continue
        what = (
            f"{peer.round_trip_s * 1e3:.1f} ms, sends {_size(peer.sent_bytes_per_s)}/s, "
            f"receives {_size(peer.received_bytes_per_s)}/s"
        )
        slow = "look at this link: cable, switch port, duplex, MTU, which interface the address is on"
        if _rate(peer) < SLOW_PAIR * usual:
            yield Finding(check, Verdict.WARNING, f"{what}; the median of the pairs is {_size(usual)}/s", slow)
        elif _rate(peer) < BANDWIDTH_BYTES_PER_S or peer.round_trip_s > ROUND_TRIP_S:
            yield Finding(check, Verdict.WARNING, what, slow)
        else:
            yield Finding(check, Verdict.OK, what)


def python(found: RankPython) -> Finding:
    """Judge a Python in which ranks run. A task may name another one where none is listed."""
    worst = Verdict.FAILED if found.listed else Verdict.WARNING
    if found.problem:
        advice = "install the library's wheel (docs/deploy.md); UNICRON_INTERPRETERS names the Pythons of the ranks"
        return Finding("python", worst, f"{found.path}: {found.problem}", advice)
    if found.lacking:
        what = f"{found.path} has no {', '.join(found.lacking)}"
        return Finding("python", worst, what, f"{found.path} -m pip install {' '.join(found.lacking)}")
    return Finding("python", Verdict.OK, f"{found.path} has unicron {found.versions['unicron']} and what it needs")


def versions(facts: Facts) -> Iterator[Finding]:
    """Judge the versions beside those of the peers."""
    mine = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    lacking = [package for package in RANK_PACKAGES if package not in facts.versions]
    if lacking:
        yield Finding(
            "versions",
            Verdict.WARNING,
            f"{mine}; without {', '.join(lacking)}",
            "install them, or name the Python of the ranks with UNICRON_INTERPRETERS; a task may name its own",
        )
    else:
        yield Finding("versions", Verdict.OK, mine)
    for peer in facts.peers:
        names = sorted({*facts.versions, *peer.versions})
        other = [
            f"{name} {peer.versions.get(name, 'none')} there, {facts.versions.get(name, 'none')} here"
            for name in names
            if not peer.problem and peer.versions.get(name) != facts.versions.get(name)
        ]
        if other:
            yield Finding(
                f"versions of {peer.peer}", Verdict.WARNING, "; ".join(other), "install the same on all nodes of a task"
            )


def devices(facts: Facts) -> Finding:
    """Judge the devices beside the number of workers."""
    found = facts.devices
    if found.problem:
        return Finding(
            "devices", Verdict.FAILED, found.problem, "check the driver (nvidia-smi) and the container's devices"
        )
    if not found.names:
        return Finding("devices", Verdict.OK, f"no GPU: {facts.workers} CPU workers")
    kinds = ", ".join(sorted(set(found.names)))
    what = f"{len(found.names)} ({kinds}), driver {found.driver}; {facts.workers} workers"
    if facts.workers > len(found.names):
        return Finding("devices", Verdict.FAILED, what, f"set UNICRON_WORKERS_PER_NODE to {len(found.names)} or less")
    if len(set(found.names)) > 1:
        return Finding(
            "devices", Verdict.WARNING, what, "all devices of a node have to be of one kind: hide the others"
        )
    if facts.workers < len(found.names):
        return Finding("devices", Verdict.WARNING, what, f"set UNICRON_WORKERS_PER_NODE to {len(found.names)}")
    return Finding("devices", Verdict.OK, what)


def each_device(found: Iterable[DeviceFacts]) -> Iterator[Finding]:
    """Judge each device by what its counters say."""
    for device in found:
        parts = [
            device.name or "no name",
            "" if device.memory_bytes is None else _size(device.memory_bytes),
            "" if device.temperature_c is None else f"{device.temperature_c} C",
            "" if device.utilisation_percent is None else f"{device.utilisation_percent}% busy",
            "" if device.memory_used_bytes is None else f"{_size(device.memory_used_bytes)} used",
        ]
        what = ", ".join(part for part in [*parts, *device.faults, *device.notes] if part)
        check = f"device {device.entry}"
        if device.faults:
            yield Finding(check, Verdict.FAILED, what, "reset the device (nvidia-smi --gpu-reset), or hide it")
        elif device.notes:
            yield Finding(check, Verdict.WARNING, what, "look at cooling and power, and at nvidia-smi -q")
        else:
            yield Finding(check, Verdict.OK, what)


def storage(facts: Facts) -> Iterator[Finding]:
    """Judge the place of checkpoints."""
    found = facts.storage
    if found.problem:
        yield Finding(
            "storage",
            Verdict.FAILED,
            f"{found.place}: {found.problem}",
            "mend it, or set UNICRON_CHECKPOINT_URL; a URL needs credentials and its client (unicron[s3], [gcs])",
        )
        return
    what = f"{found.place} writes {_size(found.write_bytes_per_s)}/s, reads {_size(found.read_bytes_per_s)}/s"
    if min(found.write_bytes_per_s, found.read_bytes_per_s) < STORAGE_BYTES_PER_S:
        yield Finding(
            "storage", Verdict.WARNING, what, "checkpoints will take long: use faster storage, or write fewer"
        )
    else:
        yield Finding("storage", Verdict.OK, what)
    if not found.shared:
        yield Finding(
            "storage is shared",
            Verdict.WARNING,
            "only the run directory is known here as the place of checkpoints",
            "let all nodes see it, or give the place: UNICRON_CHECKPOINT_URL, checkpoint.url of the task",
        )


def rights(facts: Facts) -> Finding:
    """Judge under which users ranks can run."""
    if facts.rights_problem:
        return Finding(
            "rights", Verdict.FAILED, facts.rights_problem, "start the agent so, or leave UNICRON_RANK_UIDS empty"
        )
    if facts.separate_users:
        return Finding("rights", Verdict.OK, f"user {facts.uid}, each task as a user of its own")
    return Finding("rights", Verdict.OK, f"user {facts.uid}, ranks as well (UNICRON_RANK_UIDS would separate them)")


def _rate(peer: Peer) -> float:
    return min(peer.sent_bytes_per_s, peer.received_bytes_per_s)


def _size(value: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value / 1e3:.0f} kB"
