"""What ``unicron doctor`` measures of a node. ``checks.py`` judges it, ``measuring.py`` collects it."""

from __future__ import annotations

from pydantic import Field

from shared.model import Model

RANK_PACKAGES = ("torch", "megatron-core")
"""Packages with which ranks compute; all nodes of a task need the same."""


class Nats(Model):
    """NATS as the node reaches it. ``problem``: why it does not; empty if it does."""

    servers: list[str]
    problem: str = ""
    version: str = ""
    round_trip_s: float = 0.0


class Peer(Model):
    """Another node, on which ``unicron doctor --listen`` runs.

    ``problem``: why it was not reached; empty if it was. ``offset_s``: how much its clock is ahead, to within half of
    ``round_trip_s``. ``sent_bytes_per_s``, ``received_bytes_per_s``: over one TCP connection.
    """

    peer: str
    problem: str = ""
    node: str = ""
    round_trip_s: float = 0.0
    offset_s: float = 0.0
    sent_bytes_per_s: float = 0.0
    received_bytes_per_s: float = 0.0
    versions: dict[str, str] = Field(default_factory=dict)


class DeviceFacts(Model):
    """A GPU. ``entry``: as ``CUDA_VISIBLE_DEVICES`` lists it. ``faults``, ``notes``: what its counters say."""

    entry: str
    name: str
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    temperature_c: int | None = None
    utilisation_percent: int | None = None
    faults: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)


class Devices(Model):
    """GPUs, by the driver's names. ``problem``: why it names none though there is a driver. ``driver``: its version.

    ``each``: what there is to say of each.
    """

    names: list[str] = Field(default_factory=list)
    driver: str = ""
    problem: str = ""
    each: list[DeviceFacts] = Field(default_factory=list)


class Storage(Model):
    """The place of checkpoints, to which a file was written, renamed, read back and deleted."""

    place: str
    problem: str = ""
    shared: bool = True
    """Whether the place is one that all nodes may see: false where it is only the run directory."""
    write_bytes_per_s: float = 0.0
    read_bytes_per_s: float = 0.0


class RankPython(Model):
    """A Python of the node in which ranks run.

    ``listed``: it is of the setting ``interpreters``, and not the agent's own for want of any. ``problem``: why no rank
    can; empty: nothing that it says. ``lacking``: modules that ranks need.
    """

    path: str
    listed: bool
    problem: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    lacking: list[str] = Field(default_factory=list)


class Facts(Model):
    """What was measured on a node.

    ``clock_synchronised``: whether the kernel says that its clock is; None where it does not say. ``memory_place``:
    of in-memory copies; ``memory_clearers``: settings that clear it; ``state_bytes``: model and optimizer state of the
    node's workers, if it was given.
    ``name_problem``: why the node has no name. ``host_addresses``: what the host name stands for. ``address``,
    ``interface``: under which peers reach the node; empty, with ``address_problem``, where that is not known.
    ``open_files``, ``threads``, ``ports``: how many ranks may have; None: no limit is known.
    ``output_bytes``: what ranks of one task may print and leave. ``rights_problem``: why the node may not run ranks as
    other users; empty also where it is not to.
    """

    node: str
    name_problem: str
    host_name: str
    host_addresses: list[str]
    address: str
    interface: str
    address_problem: str
    clock_synchronised: bool | None
    memory_place: str
    memory_bytes: int
    memory_free_bytes: int
    memory_clearers: list[str] = Field(default_factory=list)
    state_bytes: int | None
    open_files: int | None
    run_dir: str
    disk_free_bytes: int
    output_bytes: int
    uid: int
    separate_users: bool
    rights_problem: str
    workers: int
    nats: Nats | None
    peers: list[Peer]
    versions: dict[str, str]
    pythons: list[RankPython] = Field(default_factory=list)
    devices: Devices
    storage: Storage
    threads: int | None = None
    ports: int | None = None
