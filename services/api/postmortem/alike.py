"""Earlier incidents that are like one. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.api.postmortem.model import Alike, AlikeIncident
from shared.views.documents import IncidentView

EXAMINED = 1000
"""Incidents before one that are compared with it: years of a node's life, months of a large cluster's."""

SHOWN = 10
"""Incidents that are listed: a page of them; the numbers tell of the others."""


def alike(view: IncidentView, before: Sequence[IncidentView]) -> Alike:
    """Return what earlier incidents have in common with one. ``before``: the newest first."""
    common = [(found, list(_in_common(view, found))) for found in before]
    like = sorted(((found, what) for found, what in common if what), key=lambda pair: -len(pair[1]))
    return Alike(
        examined=len(before),
        same_kind=sum(found.kind is view.kind for found in before),
        same_node=sum(_same(view.node, found.node) for found in before),
        same_worker=sum(_same(view.worker, found.worker) for found in before),
        newest=[shown(found, what) for found, what in like[:SHOWN]],
    )


def _in_common(view: IncidentView, other: IncidentView) -> Iterator[str]:
    """Yield what two incidents have in common, in words: the kind together with a place, an error or a task."""
    if _same(view.worker, other.worker):
        yield f"worker {view.worker}"
    elif _same(view.node, other.node):
        yield f"node {view.node}"
    failure, its = view.evidence.get("failure"), other.evidence.get("failure")
    if isinstance(failure, str) and failure and failure == its:
        yield f"failure {failure}"
    if other.kind is view.kind:
        yield f"kind {view.kind.value}"
        if _same(view.task, other.task):
            yield f"task {view.task}"


def _same(one: str | None, other: str | None) -> bool:
    return one is not None and one == other


def shown(view: IncidentView, in_common: list[str]) -> AlikeIncident:
    """Return an earlier incident as a page lists it."""
    return AlikeIncident(
        id=view.id,
        occurred_at=view.occurred_at,
        kind=view.kind.value,
        severity=view.severity.value,
        where=view.worker or view.node or view.task or "the cluster",
        in_common=in_common,
    )
