"""Slices of the history: the views whose claims reach into a time, and what is needed to settle it.

``shared/costs/claim_times.py`` says from when to when a view has claims; the tables have these times as columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from sqlalchemy import ColumnElement, Connection, and_, select

from services.api.store.tables import INCIDENTS, PLANS, SPANS, Kind, PlanRow, SpanRow, V, table_of
from shared.costs.ledger import History
from shared.costs.span_claims import Window


class Views(Protocol):
    """Where views are read by their keys."""

    def several(self, kind: Kind[V], keys: Iterable[str]) -> dict[str, V]:
        """Return those of the views that there are."""
        ...


def history_of(connection: Connection, views: Views, window: Window) -> History:
    """Return the views whose claims reach into a window, with all plans of their incidents, in the ledger's order.

    A plan's claims depend on which plans answered its incidents before it.
    """
    spans = views.several(SPANS, _keys(connection, SpanRow, window)).values()
    plans = views.several(PLANS, _keys(connection, PlanRow, window))
    named = {incident for plan in plans.values() for incident in plan.incidents}
    incidents = views.several(INCIDENTS, named | {span.incident for span in spans if span.incident})
    answers = {plan for name in named if name in incidents for plan in incidents[name].plans}
    plans |= views.several(PLANS, answers - plans.keys())
    return History(
        plans=sorted(plans.values(), key=lambda plan: plan.position),
        incidents=sorted(incidents.values(), key=lambda incident: incident.position),
        spans=sorted(spans, key=lambda span: (span.position, span.id)),
    )


def _keys(connection: Connection, model: type[PlanRow] | type[SpanRow], window: Window) -> list[str]:
    table = table_of(model)
    return list(connection.scalars(select(table.c.key).where(reaching(table, window.start_s, window.end_s))))


def reaching(table: Any, start_s: float, before_s: float) -> ColumnElement[bool]:
    """Return the condition that a row's claims reach beyond ``start_s`` and begin before ``before_s``.

    The sum keeps the database from looking for the rows by when they begin, which nearly all of a history do before.
    """
    return and_(table.c.reach_s > start_s, table.c.start_s + 0.0 < before_s)
