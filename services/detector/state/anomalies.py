"""What the log has of slow workers and open anomalies: the fold, from which no anomaly is appended twice. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from shared.events.union import AnomalyObserved


@dataclass(frozen=True, slots=True)
class OpenAnomaly:
    """An anomaly that lasts. ``expected``: the usual number, as the log has it."""

    kind: str
    generation: int
    step: int
    expected: float
    node: str | None = None
    peer: str | None = None


def key_of(kind: str, node: str | None = None, peer: str | None = None) -> str:
    """Return the key of an anomaly of a task: there is one of each kind, and one slow link of each pair of nodes."""
    return kind if node is None else f"{kind}/{node}/{peer}"


def fold(known: dict[str, OpenAnomaly], event: AnomalyObserved) -> None:
    """Add an event of a task to its open anomalies, or take the anomaly that it ends from them."""
    key = key_of(event.kind, event.node if event.kind == "slow-link" else None, event.peer)
    if event.ended:
        known.pop(key, None)
    else:
        known[key] = OpenAnomaly(event.kind, event.generation, event.step, event.expected, event.node, event.peer)
