"""Answers of the interface about the parts of a node: its workers and its devices."""

from __future__ import annotations

from pydantic import BaseModel, Field


class NodeWorker(BaseModel):
    """A worker slot. ``slowdown``: as of a rank; the newest that was measured, whatever it does now.

    ``device``: of ``devices`` of the node; null: the worker has none, or its agent has not said yet which.
    """

    worker: str
    task: str | None
    rank: int | None
    state: str
    slowdown: float = 1.0
    device: int | None = None


class NodeDevice(BaseModel):
    """A device of a node. ``device``: NVML's index. ``notes``: what is unusual and breaks nothing, in words.

    ``faults``: how often each fault has come since the agent started: Xid codes (``xid-79``) and conditions. ``name``:
    of the product. ``memory_bytes``: all that it has. ``driver``: version. ``workers``: that have the device or a part
    of it. ``temperature_c``, ``utilisation_percent`` (of the time in which a kernel ran), ``memory_used_bytes``: at the
    agent's newest look, every 5 s. Null: the driver does not say.
    """

    device: int
    uuid: str
    notes: list[str]
    faults: dict[str, int]
    name: str = ""
    workers: list[str] = Field(default_factory=list)
    memory_bytes: int | None = None
    driver: str = ""
    temperature_c: int | None = None
    utilisation_percent: int | None = None
    memory_used_bytes: int | None = None
