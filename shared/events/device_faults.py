"""Faults of devices: the severity and the response of each Xid code, and of what NVML's counters say.

The table is ``xid.json``, with what each source recommends and, where they disagree, the reason for the choice. The
detector decides by it; the agent reports every code.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from shared.events.severities import Severity

XID = "xid-"
"""Prefix of the names of faults that are Xid codes; the code follows."""

CONDITIONS = (
    GPU_LOST,
    RESET_REQUIRED,
    REBOOT_REQUIRED,
    DRAIN_PEERS,
    ROW_REMAP_FAILURE,
    ECC_UNCORRECTABLE,
) = (
    "gpu-lost",
    "reset-required",
    "reboot-required",
    "drain-peers",
    "row-remap-failure",
    "ecc-uncorrectable",
)
"""Names of the faults that are no Xid codes: what NVML answers or counts."""

CONTAINMENT_XIDS = frozenset({48, 64, 94, 95, 140})
"""Xid codes that say whether an uncorrectable memory error was contained: the counter alone does not say so."""


class DeviceFault(NamedTuple):
    """What a fault of a device means.

    Attributes:
        name: ``xid-79``, or one of ``CONDITIONS``.
        meaning: a few words.
        severity: its severity; None: it is recorded only, since it does not break the work by itself.
        response: what follows, and what an operator does, in words.
        why: the reason for the severity where sources disagree; empty: there is none.
    """

    name: str
    meaning: str
    severity: Severity | None
    response: str
    why: str = ""


@cache
def _table() -> dict[str, DeviceFault]:
    """Return the faults by name; the fault with the empty name stands for unknown ones."""
    text = files("shared").joinpath("xid.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    entries = {f"{XID}{entry['code']}": entry for entry in document["xids"]}
    entries |= {entry["name"]: entry for entry in document["conditions"]}
    responses: dict[str, str] = document["responses"]
    return {name: _fault(name, entry, responses) for name, entry in {**entries, "": document["unknown"]}.items()}


def _fault(name: str, entry: dict[str, Any], responses: dict[str, str]) -> DeviceFault:
    severity = entry["severity"]
    return DeviceFault(
        name=name,
        meaning=entry.get("meaning") or entry.get("name", "a code that the table does not have"),
        severity=Severity(severity) if severity is not None else None,
        response=responses[entry["response"]],
        why=entry.get("why", ""),
    )


def of_xid(code: int) -> str:
    """Return the name of the fault with an Xid code."""
    return f"{XID}{code}"


def device_fault(name: str) -> DeviceFault:
    """Return what a fault means, by its name; one that the table does not have is recorded only (``xid.json``)."""
    table = _table()
    return table.get(name) or table[""]._replace(name=name)


def known() -> list[str]:
    """Return the names of the faults in the table."""
    return [name for name in _table() if name]
