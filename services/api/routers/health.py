"""``/healthz``, ``/readyz`` and ``/v1/status``: whether the parts of the control plane work."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Response, status

from services.api import present
from services.api.gateway import Api, Gateway
from services.api.route_parts.parameters import PROBLEMS as READ_PROBLEMS
from services.api.route_parts.parameters import problems
from services.api.store.readers import ViewReader
from services.api.store.tables import NODES
from shared.bus.messages import PROTOCOL
from shared.errors import UnicronError
from shared.events.union import PlanDecided
from shared.interface.readiness import Check, Instance, Readiness, Versions
from shared.log.log import EventLog
from shared.log.unreadable import NEWEST
from shared.machine.process_names import shown
from shared.messages.health import HEALTH, Health
from shared.projections.nodes import AGENT_LIVES
from shared.service.metrics import version
from shared.views.documents import NodeState, NodeView

router = APIRouter(tags=["health"])

SERVICES = ("detector", "planner", "transition")

PLAN = str(PlanDecided.model_fields["type"].default)

_LOG_TIMEOUT_S = 2.0
"""A database that has lost its power answers nothing at all; a busy one may take a second."""

_OTHERS_S = 0.05
"""Time for the answers of processes that stand by, once the active one has answered: they take milliseconds."""

_NAMED = 5
"""Unreachable nodes that the check names."""

_NOT_READY: dict[int | str, dict[str, Any]] = {503: {"model": Readiness}}

_PROBLEMS = problems(421, 422)
"""Probes need no credentials."""


@router.get("/healthz", responses=_PROBLEMS)
async def healthz() -> dict[str, str]:
    """Answer, which shows that this process runs."""
    return {"status": "ok"}


@router.get("/readyz", responses=_NOT_READY | _PROBLEMS)
async def readyz(response: Response, api: Api) -> Readiness:
    """Report whether tasks can be taken: log, bus, the other services and at least one node."""
    found = await readiness(api)
    if not found.ready:
        response.status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    return found


@router.get("/v1/status", responses=READ_PROBLEMS)
async def part_status(api: Api) -> Readiness:
    """Report the same to people, with 200 whatever it is: how each part of the control plane is, and its lag."""
    found, decider = await asyncio.gather(readiness(api), asyncio.to_thread(_decider, api.journal.log))
    agents = Counter(beat.protocol for beat in api.live.state().heartbeats.values())
    versions = Versions(program=version(), events=NEWEST, messages=PROTOCOL, decider=decider, agents=dict(agents))
    return found.model_copy(update={"versions": versions})


def _decider(log: EventLog) -> int | None:
    """Return the decider of the newest plan in the log; None where there is none, or the log does not answer."""
    kinds = (PLAN,)
    try:
        found = log.read(after=log.last_of_types(kinds, 1), limit=1, types=kinds)
    except UnicronError:
        return None
    return next((record.event.decider for record in found if isinstance(record.event, PlanDecided)), None)


async def parts_away(api: Gateway, *, besides: str = "") -> list[str]:
    """Return what does not work, in words; empty: everything does. ``besides``: a check that does not count."""
    checks = (await readiness(api)).checks
    return [f"{check.name}: {check.detail}" for check in checks if not check.ok and check.name != besides]


async def readiness(api: Gateway) -> Readiness:
    """Return how each part of the control plane is."""
    log_asked = asyncio.create_task(_log(api))

    async def last_position() -> int | None:
        return (await asyncio.shield(log_asked))[1]

    services = asyncio.gather(*(_service(api, name, last_position) for name in SERVICES))
    (log, last), nodes, known = await asyncio.gather(log_asked, _nodes(api), services)
    trouble = api.bus.trouble
    bus = Check(
        name="bus",
        ok=not trouble,
        detail=f"waiting for the bus: {trouble}" if trouble else "",
        counters=api.bus.dropped.counters,
    )
    own = Check(name="api", ok=True, lag=_lag(last, api.feed.position))
    checks = [bus, log, nodes, *known, own]
    return Readiness(ready=all(check.ok for check in checks), checks=checks)


def _lag(last: int | None, handled: int | None) -> int | None:
    """Return how many events up to the last one were not handled; what was handled meanwhile is no lag."""
    return None if last is None or handled is None else max(last - handled, 0)


async def _log(api: Gateway) -> tuple[Check, int | None]:
    """Return how the log is, and its last position if it answers."""
    log = api.journal.log
    if api.writable is None or api.writable.done():
        api.writable = asyncio.create_task(asyncio.to_thread(log.check_writable))
        api.writable.add_done_callback(_forget_error)
    what = "read"
    try:
        async with asyncio.timeout(_LOG_TIMEOUT_S):
            position = await asyncio.to_thread(log.last_position)
            what = "written"
            await asyncio.shield(api.writable)
    except UnicronError as err:
        return Check(name="log", ok=False, detail=err.detail), None
    except TimeoutError:
        return Check(name="log", ok=False, detail=f"it could not be {what} within {_LOG_TIMEOUT_S:g} s"), None
    return Check(name="log", ok=True, detail=f"position {position}, projected {api.feed.position}"), position


def _forget_error(checked: asyncio.Task[None]) -> None:
    """Take note of an error for which no request waits any more: otherwise asyncio reports it as never retrieved."""
    if not checked.cancelled():
        checked.exception()


async def _nodes(api: Gateway) -> Check:
    live = api.live.state(watched=False)

    def read(views: ViewReader) -> list[NodeView]:
        return [node for node in views.all(NODES) if node.state in AGENT_LIVES]

    try:
        async with asyncio.timeout(_LOG_TIMEOUT_S):
            logged = await api.read(read)
    except UnicronError as err:
        return Check(name="nodes", ok=False, detail=err.detail)
    except TimeoutError:
        return Check(name="nodes", ok=False, detail=f"the projections do not answer within {_LOG_TIMEOUT_S:g} s")
    silent = [view.name for view in logged if present.node_state(view, live) == present.UNREACHABLE]
    heard = [view.state for view in logged if view.name not in set(silent)]
    ready = heard.count(NodeState.READY)
    closed = len(heard) - ready
    # With closed nodes only, tasks can be submitted, and wait.
    detail = f"{ready} ready" + (f", {closed} closed to new work" if closed else "")
    if silent:
        detail += f", {len(silent)} unreachable ({', '.join(silent[:_NAMED])}{', ...' if len(silent) > _NAMED else ''})"
    if silent and live.reachability.cut_off_since is not None:
        detail += "; the control plane is cut off from all nodes: nothing is replaced"
    return Check(name="nodes", ok=ready + closed > 0, detail=detail, counters=live.counters())


async def _service(api: Gateway, name: str, last: Callable[[], Awaitable[int | None]]) -> Check:
    """Return how a service is: its active process, and those that stand by."""
    if not api.bus.connected:
        return Check(name=name, ok=False, detail="not known: the bus is away")
    try:
        found = await api.bus.call_all(HEALTH, None, name, suffices=_any_active, others_s=_OTHERS_S)
    except UnicronError as err:
        return Check(name=name, ok=False, detail=err.detail)
    position = await last()
    found.sort(key=lambda health: (not health.active, -health.token))
    instances = [
        Instance(process=shown(one.process), active=one.active, token=one.token, lag=_lag(position, one.handled))
        for one in found
    ]
    first = found[0]
    detail = "" if first.ready else first.detail or "starting"
    if not first.active:
        detail = f"none is active: {first.detail or f'{len(found)} stand by'}"
    return Check(
        name=name,
        ok=first.ready and first.active,
        detail=detail,
        lag=_lag(position, first.handled),
        counters=first.counters,
        instances=instances if len(instances) > 1 or not first.active else [],
    )


def _any_active(found: Sequence[Health]) -> bool:
    return any(health.active for health in found)
