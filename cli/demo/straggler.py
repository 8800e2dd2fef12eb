"""The demo's straggler: a rank is slowed down, and a plan gives its work to others."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cli.waiting import Record, WaitingClient
from shared.events.plans import Trigger
from shared.events.union import FaultInjected, PlanDecided, StateMoved, WorkerSlowed

SLOWDOWN = 3.0
"""How many times as long the rank's passes take: below what counts as a hang, and no noise."""

LIMIT_S = 20.0
"""Longest wait for the worker to be found and its work to be moved: some twenty steps, a plan, and its first step."""


@dataclass(frozen=True)
class Straggler:
    """What became of a slow worker. ``found_s``, ``moved_s``: seconds from the fault's record in the log.

    ``id``: of its slowdown.
    """

    id: str
    task: str
    worker: str
    slowdown: float
    plan: str
    found_s: float
    moved_s: float
    left: bool
    """Whether the worker is no longer one of the task's."""


async def straggle(client: WaitingClient, task: str, rank: int) -> Straggler:
    """Slow a rank down, and wait until a plan for it is carried out; return what became of it.

    Raises:
        TimedOut: there is no such plan, or it is not carried out, within ``LIMIT_S``.
    """
    fault: Record = await client.post(f"/v1/tasks/{task}/faults", {"fault": f"slow={SLOWDOWN:g}", "rank": rank})
    worker: str = fault["worker"]

    async def moved() -> Straggler | None:
        return found(await client.items("/v1/events"), fault["id"], task, worker)  # the log of a demo is short

    return await client.until(f"the slow worker {worker} of {task} is moved", moved, LIMIT_S)


def found(records: list[Record], fault: str, task: str, worker: str) -> Straggler | None:
    """Return what the log says of a slow worker, once the plan for it is carried out.

    Args:
        records: of the log, in its order.
        fault: id of the injected fault; only what follows counts.
        task: of the worker.
        worker: the slow one.
    """
    injected = slowed = plan = None
    for record in records:
        event: dict[str, Any] = record["event"]
        match record["type"]:
            case kind if kind == _type(FaultInjected) and event["event_id"] == fault:
                injected = record
            case kind if injected and kind == _type(WorkerSlowed) and event["worker"] == worker:
                slowed = slowed or record
            case kind if slowed and kind == _type(PlanDecided) and event["trigger"] == Trigger.WORKER_SLOWED:
                plan = record if task in {change["task"] for change in event["changes"]} else plan
            case kind if injected and slowed and plan and kind == _type(StateMoved):
                if (event["plan"], event["task"]) == (plan["event"]["plan"], task) and event["complete"]:
                    change = next(change for change in plan["event"]["changes"] if change["task"] == task)
                    return Straggler(
                        id=slowed["event"]["event_id"],
                        task=task,
                        worker=worker,
                        slowdown=slowed["event"]["slowdown"],
                        plan=event["plan"],
                        found_s=_between(injected, slowed),
                        moved_s=_between(injected, record),
                        left=worker not in {member["worker"] for member in change["target"]["members"]},
                    )
    return None


def _type(kind: type[Any]) -> str:
    name: str = kind.model_fields["type"].default
    return name


def _between(first: Record, last: Record) -> float:
    times = [datetime.fromisoformat(record["recorded_at"]) for record in (first, last)]
    return (times[1] - times[0]).total_seconds()
