"""Faults that a user asks for (``unicron inject``): judged, logged, and then passed on to the node's agent.

The log has ``fault.injected`` before the fault happens. What is refused is not logged: the agent is asked first whether
the fault can happen. A fault is passed on once. If the api ends between the two, the fault is in the log and does not
happen.
"""

from __future__ import annotations

import asyncio
import uuid

from services.api.access.access import Actor
from services.api.gateway import READ_YOUR_WRITES_S, Gateway
from services.api.store.tables import NODES
from shared.errors import Conflict, FaultsDisabled, Unavailable
from shared.events.union import FaultInjected, derived_id
from shared.interface.models import InjectedFault, NodeFault, RankFault
from shared.log.log import EventLog
from shared.messages.injection import FAULTS, OF_NODES, OF_RANKS, FaultRequest, FaultResult, parse, refusal
from shared.model import utc_now
from shared.projections.nodes import AWAY
from shared.tasks.specification import ENDED


async def of_rank(api: Gateway, name: str, who: Actor, asked: RankFault, key: str) -> InjectedFault:
    """Have a fault happen in a rank of a task; return it.

    Args:
        api: the gateway.
        name: of the task.
        who: asks for it.
        asked: the fault.
        key: idempotency key; a further request with it returns the fault of the first one. Empty: none.

    Raises:
        FaultsDisabled: the setting ``fault_injection`` is off, here or on the node.
        NotFound: there is no such task.
        InvalidInput: there is no such fault, rank or step, or the rank does not train now.
        Conflict: the task has ended, or the key was used for something else.
        Unavailable: the node's agent does not answer.
    """
    _check_enabled(api)
    fault = parse(asked.fault)
    if not fault.of_rank:
        raise refusal("fault", asked.fault, f"a fault of a node; of a rank: {', '.join(OF_RANKS.values())}")
    task = await api.task(name)
    member = next((member for member in task.members if member.rank == asked.rank), None)
    event = FaultInjected(
        event_id=_id(key),
        occurred_at=utc_now(),
        fault=fault.text,
        task=name,
        rank=asked.rank,
        step=asked.step,
        actor=who.name,
    )
    if key and (known := await _known(api, key, event)) is not None:
        return _shown(known, member.worker if member else None, member.node if member else "")
    if task.state in ENDED:
        raise Conflict(f"task {name!r} has ended: {task.state.value}", state=task.state.value)
    if member is None:
        ranks = ", ".join(str(member.rank) for member in task.members) or "none: the task does not train"
        raise refusal("rank", asked.rank, f"the task has no such rank now; its ranks: {ranks}")
    if asked.step is not None and asked.step > task.spec.steps:
        raise refusal("step", asked.step, f"must be at most {task.spec.steps}, the task's last")
    request = FaultRequest(
        fault_id=event.event_id,
        fault=fault.text,
        task=name,
        worker=member.worker,
        rank=asked.rank,
        step=asked.step,
    )
    await _inject(api, member.node, event, request, {"fault": fault.text, "rank": asked.rank, "step": asked.step})
    return _shown(event, member.worker, member.node)


async def of_node(api: Gateway, name: str, who: Actor, asked: NodeFault, key: str) -> InjectedFault:
    """Have a fault happen on a node; return it. The arguments and the errors are as those of ``of_rank``."""
    _check_enabled(api)
    fault = parse(asked.fault)
    if fault.of_rank:
        raise refusal("fault", asked.fault, f"a fault of a rank; of a node: {', '.join(OF_NODES.values())}")
    node = await api.read(lambda views: views.find(NODES, name))
    event = FaultInjected(event_id=_id(key), occurred_at=utc_now(), fault=fault.text, node=name, actor=who.name)
    if key and (known := await _known(api, key, event)) is not None:
        return _shown(known, None, name)
    if node.state in AWAY:
        raise Conflict(f"node {name!r} is {node.state.value}: it has no agent", state=node.state.value)
    await _inject(api, name, event, FaultRequest(fault_id=event.event_id, fault=fault.text), {"fault": fault.text})
    return _shown(event, None, name)


def _check_enabled(api: Gateway) -> None:
    if not api.settings.fault_injection:
        raise FaultsDisabled("faults are not injected here: UNICRON_FAULT_INJECTION=1 enables it, for api and agents")


def _id(key: str) -> str:
    return derived_id(f"idempotency/{key}", "api/faults") if key else str(uuid.uuid4())


async def _known(api: Gateway, key: str, asked: FaultInjected) -> FaultInjected | None:
    """Return the fault of an earlier request with this key.

    Raises:
        Conflict: it was another fault.
    """
    event = await asyncio.to_thread(_find, api.journal.log, asked.event_id)
    if event is not None and event != asked.model_copy(update={"occurred_at": event.occurred_at}):
        raise Conflict(f"idempotency key {key!r} was used for another fault: {event.fault}")
    return event


def _find(log: EventLog, event_id: str) -> FaultInjected | None:
    data = next((data for _, found, data in log.raw("fault.injected") if found == event_id), None)
    return FaultInjected.model_validate_json(data) if data is not None else None


async def _inject(
    api: Gateway, node: str, event: FaultInjected, request: FaultRequest, asked: dict[str, object]
) -> None:
    """Ask whether the fault can happen, log it, and have it happen."""
    _check(node, await _ask(api, node, request.model_copy(update={"judge": True})), asked)
    recorded = await api.append(event, None)
    result = await _ask(api, node, request)
    await api.feed.reach(recorded.position, timeout_s=READ_YOUR_WRITES_S)
    if result.problem:
        raise Conflict(f"the fault is in the log and has not happened: {result.problem}")


async def _ask(api: Gateway, node: str, request: FaultRequest) -> FaultResult:
    try:
        return await api.bus.call(FAULTS, request, node)
    except Unavailable as err:
        raise Unavailable(f"the agent of node {node!r} does not answer: {err.detail}") from err


def _check(node: str, result: FaultResult, asked: dict[str, object]) -> None:
    """Raise what an agent's answer amounts to."""
    if result.disabled:
        raise FaultsDisabled(f"node {node!r}: {result.problem}")
    if result.problem:
        raise refusal(result.field, asked.get(result.field), result.problem)


def _shown(event: FaultInjected, worker: str | None, node: str) -> InjectedFault:
    return InjectedFault(
        id=event.event_id,
        fault=event.fault,
        task=event.task,
        rank=event.rank,
        step=event.step,
        worker=worker,
        node=node,
        actor=event.actor,
        at=event.occurred_at,
    )
