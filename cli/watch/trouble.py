"""A trouble of a node, as a watcher finds it and as the server takes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

REASON_CHARACTERS = 200
"""Longest reason that the server takes."""

VALUE_CHARACTERS = 1000
"""Longest text in the evidence of a trouble: four of them are less than the evidence that the server takes."""


Severity = Literal["warning", "error"]


@dataclass(frozen=True, slots=True)
class Trouble:
    """A trouble of a node.

    Attributes:
        node: its name.
        key: the name of the trouble, the same each time that it is found (``key_of``).
        severity: a warning has the node drained, an error has it isolated.
        reason: in words.
        evidence: what was seen: names and values, of which at most four are long.
        deadline_at: when the node goes away in any case; None: nobody has said so.
    """

    node: str
    key: str
    severity: Severity
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    deadline_at: datetime | None = None

    def body(self, now: datetime) -> dict[str, Any]:
        """Return the body of the request that reports the trouble."""
        body: dict[str, Any] = {
            "key": self.key,
            "severity": self.severity,
            "reason": " ".join(self.reason.split())[:REASON_CHARACTERS],
            "evidence": {name: _short(value) for name, value in self.evidence.items()},
        }
        if self.deadline_at is not None:
            body["deadline_s"] = max(0.0, (self.deadline_at - now).total_seconds())
        return body


def key_of(*parts: str) -> str:
    """Return the key that these parts make together."""
    text = re.sub(r"[^a-z0-9._-]+", "-", ".".join(parts).lower()).strip("._-")
    return text[:63].rstrip("._-") or "trouble"


def label(host: str) -> str:
    """Return the name that the node of a host has by itself, in Slurm as well (``deploy/slurm/unicron.sbatch``)."""
    return host.partition(".")[0].lower().replace("_", "-")


def _short(value: Any) -> Any:
    return value[:VALUE_CHARACTERS] if isinstance(value, str) else value
