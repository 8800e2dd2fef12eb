"""``/v1/nodes`` and ``/v1/node-map``: nodes and their workers.

The map of all nodes says what each worker does; it is small enough to be asked for again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response, status

from services.api import present
from services.api.access.access import Operator, Reporter
from services.api.gateway import Api, Gateway
from services.api.live import LiveState
from services.api.requests import node_reports, node_requests
from services.api.route_parts.bodies import described, options
from services.api.route_parts.parameters import CHANGE, NAMED, PROBLEMS, Cursor, Limit, NodeName, page
from services.api.store.readers import ViewReader
from services.api.store.tables import NODES, TASKS
from shared.interface.first_look import NodeMap
from shared.interface.models import DrainRequest, Node, NodeReport, NodeRequest, Page, ReportRequest, ShownNodeState
from shared.model import utc_now
from shared.projections.nodes import AGENT_LIVES
from shared.tasks.specification import GOING_ON
from shared.views.documents import NodeState, NodeView

router = APIRouter(prefix="/v1", tags=["nodes"], responses=PROBLEMS)


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


def _assigned(views: ViewReader) -> dict[str, tuple[str, int]]:
    """Return what tasks have of workers; those that have ended have none."""
    return present.assigned_ranks(views.page(TASKS, states=GOING_ON))


@router.get("/nodes", response_model=Page[Node])
async def nodes(
    api: Api,
    limit: Limit = 100,
    cursor: Cursor = 0,
    state: Annotated[list[ShownNodeState] | None, Query(description="only these states")] = None,
) -> Response:
    """List nodes in the order in which they first joined.

    With ``state``, a page may have fewer than ``limit`` though more follow, where nodes are unreachable.
    """
    live, now = api.live.state(), utc_now()
    wanted: set[str] = set(state or [])
    # The log knows nodes that are unreachable in the state in which they fell silent.
    silent = AGENT_LIVES if present.UNREACHABLE in wanted else frozenset()
    logged = sorted((wanted - {present.UNREACHABLE}) | silent)

    def answer(views: ViewReader) -> Page[Node]:
        found = views.page(NODES, after=cursor, limit=limit + 1, states=logged)
        assigned = _assigned(views)
        shown = page(
            [present.node(view, live, assigned, now) for view in found], [view.position for view in found], limit
        )
        return Page(items=[n for n in shown.items if not wanted or n.state in wanted], next_cursor=shown.next_cursor)

    return await api.answer(answer)


@router.get("/node-map", response_model=NodeMap)
async def all_nodes(api: Api) -> Response:
    """Show what every worker of every node does, in columns."""
    live = api.live.state()

    def answer(views: ViewReader) -> NodeMap:
        return node_map(views.all(NODES), live, views.known("assigned", lambda: _assigned(views)))

    return await api.answer(answer)


@router.get("/nodes/{name}", responses=NAMED)
async def node(name: NodeName, api: Api) -> Node:
    """Show a node."""
    live, now = api.live.state(), utc_now()
    return await api.read(lambda views: present.node(views.find(NODES, name), live, _assigned(views), now))


@router.post("/nodes/{name}/cordon", responses=CHANGE, openapi_extra=described(NodeRequest))
async def cordon(
    name: NodeName, api: Api, who: Operator, asked: Annotated[NodeRequest, Depends(options(NodeRequest))]
) -> Node:
    """Place no new work on a node; what runs there stays."""
    return await _shown(api, await node_requests.cordon(api, name, who, asked.reason))


@router.post(
    "/nodes/{name}/drain",
    status_code=status.HTTP_202_ACCEPTED,
    responses=CHANGE,
    openapi_extra=described(DrainRequest),
)
async def drain(
    name: NodeName, api: Api, who: Operator, asked: Annotated[DrainRequest, Depends(options(DrainRequest))]
) -> Node:
    """Empty a node: tasks move away at a step boundary; what cannot within the time saves its state and waits."""
    return await _shown(api, await node_requests.drain(api, name, who, asked.reason, asked.timeout_s))


@router.post("/nodes/{name}/return", responses=CHANGE)
async def put_back(name: NodeName, api: Api, who: Operator) -> Node:
    """Use a cordoned, drained or isolated node again, once its agent has passed its self-test."""
    return await _shown(api, await node_requests.put_back(api, name, who))


@router.post(
    "/nodes/{name}/reports",
    status_code=status.HTTP_202_ACCEPTED,
    responses=CHANGE,
    openapi_extra=described(ReportRequest, required=True),
)
async def report(
    name: NodeName,
    api: Api,
    who: Reporter,
    asked: Annotated[ReportRequest, Depends(options(ReportRequest, required=True))],
) -> NodeReport:
    """Report a trouble of a node: a warning has it drained, an error isolated, within what a source may do.

    The same trouble, told again, is the same report. A report brings no node back.
    """
    return present.report(await node_reports.report(api, name, who, asked))


@router.post("/nodes/{name}/agent/restart", status_code=status.HTTP_202_ACCEPTED, responses=CHANGE)
async def restart_agent(name: NodeName, api: Api, _: Operator) -> Node:
    """Start the node's agent again; ranks train on. Once that is done the node has another ``incarnation``."""
    return await _shown(api, await node_requests.restart_agent(api, name))


async def _shown(api: Gateway, view: NodeView) -> Node:
    live, now = api.live.state(), utc_now()
    return await api.read(lambda views: present.node(view, live, _assigned(views), now))
