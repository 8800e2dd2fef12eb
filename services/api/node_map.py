"""The map of all nodes: what each worker does, small enough to be asked for again and again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from services.api import present
from services.api.live import LiveState
from shared.interface.first_look import NodeMap
from shared.projections.nodes import AGENT_LIVES
from shared.views.documents import NodeState, NodeView

_REASONS = 200
"""Characters of a node's reason: as many as a user may give."""


def node_map(nodes: Iterable[NodeView], live: LiveState, assigned: Mapping[str, tuple[str, int]]) -> NodeMap:
    """Return the map of all nodes that have not left, in the order in which they first joined. Pure.

    Args:
        nodes: all nodes.
        live: what the heartbeats report.
        assigned: as ``present.assigned_ranks`` returns it.
    """
    made = NodeMap()
    places: dict[tuple[int, str | None], int] = {}

    def place(known: list[str], text: str | None) -> int:
        """Return where a text is in one of the lists; -1: there is none."""
        if text is None:
            return -1
        found = places.setdefault((id(known), text), len(known))
        if found == len(known):
            known.append(text)
        return found

    for node in nodes:
        if node.state is NodeState.LEFT:
            continue
        state, reason = present.shown_state(node, live)
        made.names.append(node.name)
        made.states.append(place(made.state_names, state))
        made.domains.append(place(made.domain_names, node.domain))
        if reason:
            made.reasons[node.name] = reason[:_REASONS]
        runs: list[int] = []
        for (task, does), alike in groupby(present.uses(node, live, assigned)):
            runs += (place(made.task_names, task), place(made.use_names, does), sum(1 for _ in alike))
        made.workers.append(runs)
        if node.slow and node.state in AGENT_LIVES:
            made.slow |= {one.worker: one.slowdown for one in node.slow if one.slowdown > 1.0}
    return made
