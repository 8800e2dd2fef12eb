"""The causes of what is wrong now, each with all that follows from it. Pure.

What follows from a cause is not said again: a task that waits for the workers of a lost node is part of the incident,
and nodes of one failure domain that are lost together are one cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any, TypeVar, get_args

from services.api.postmortem.standing import held_back, shortfalls, todo
from services.api.troubles.findings import FailedTask, Findings, OngoingIncident
from shared.costs.charges import SECONDS_PER_HOUR, money
from shared.events.severities import Severity
from shared.interface.first_look import Trouble, TroubleKind
from shared.interface.models import Incident, IncidentFacts
from shared.tasks.specification import TaskState
from shared.views.documents import NodeView, TaskView
from shared.views.observed_views import SlowdownView

MOST = 50
"""Causes that are shown: more than anybody reads."""

TOGETHER = timedelta(minutes=1)
"""Nodes of one failure domain that are lost within such a time of each other are lost by one cause: the limits after
which two of them count as lost differ by less."""

_NAMED = 3
"""Names of one cause that are said; the others are counted."""

_KEY_CHARACTERS = 6
"""Of the digest of what a cause is about: it tells one from the others of its kind that there are at the same time."""

_ORDER = get_args(TroubleKind)

_RESTARTED = {
    "log": "Start the database of the log again, or mend the way to it; the services go on by themselves.",
    "bus": "Start NATS again, or mend the way to it; the services go on by themselves.",
    "nodes": "Start the service of a node (`unicron agent`), or look at the network between nodes and control plane.",
}
"""Part of the control plane -> what to do; the others are services."""

T = TypeVar("T")


def causes(known: Findings) -> list[Trouble]:
    """Return what is wrong, the gravest first, then the costliest."""
    found = [
        *_control_plane(known),
        *_incidents(known),
        *_failed(known),
        *_waiting(known),
        *_unreachable(known),
        *_reported(known),
        *_preflights(known),
        *_slow(known),
    ]
    return sorted(
        (_shown(known, one) for one in found),
        key=lambda one: (not one.grave, _ORDER.index(one.kind), one.late_s is None, -(one.money_per_hour or 0.0)),
    )


def _shown(known: Findings, found: Trouble) -> Trouble:
    """Return a cause under a key that is short enough to be typed, and with whoever takes care of it."""
    kind, _, about = found.key.partition(" ")
    key = f"{kind}-{sha256(about.encode()).hexdigest()[:_KEY_CHARACTERS]}" if about else kind
    taken = known.cluster.taken.get(key)
    who = {} if taken is None or found.acknowledged else {"by": taken.by, "acknowledged": True}
    return found.model_copy(update={"key": key, **who})


def names(all_names: Iterable[str]) -> str:
    """Return names as they are said: the first ones, and how many more there are."""
    found = [*all_names]
    more = len(found) - _NAMED
    return ", ".join(found) if more <= 1 else f"{', '.join(found[:_NAMED])} and {more} more"


def _grouped(items: Iterable[T], key: Callable[[T], Any]) -> list[list[T]]:
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [*groups.values()]


def _line(text: str) -> str:
    return text.partition("\n")[0]


def _per_hour(known: Findings, workers: float) -> float:
    return money(workers * SECONDS_PER_HOUR, known.cluster.price_per_worker_hour)


def _counted(number: float, noun: str) -> str:
    return f"{number:.3g} {noun}{'' if number == 1 else 's'}"


# ---- the control plane


def _control_plane(known: Findings) -> Iterator[Trouble]:
    away = [check for check in known.checks if not check.ok]
    if not away:
        return
    services = [check.name for check in away if check.name not in _RESTARTED]
    steps = [_RESTARTED[check.name] for check in away if check.name in _RESTARTED]
    if services:
        steps.append(f"Start {names(services)} again (`unicron control`, or its unit); its log says why it is away.")
    parts = "; ".join(f"{check.name}: {check.detail or 'does not answer'}" for check in away)
    without_nodes = [check.name for check in away] == ["nodes"]
    what = f"No node takes part ({away[0].detail})" if without_nodes else f"The control plane does not work ({parts})"
    yield Trouble(
        key="control-plane",
        kind="control-plane",
        grave=True,
        needs_somebody=True,
        state="no nodes" if without_nodes else "away",
        what=what,
        todo=steps,
        cost_basis="not known: tasks train on, what breaks is not healed",
    )


# ---- incidents


def _incidents(known: Findings) -> Iterator[Trouble]:
    alone = [one for one in known.incidents if not _takes_node(one.incident)]
    again = _grouped(alone, lambda one: (one.incident.kind, _place(known, [one])))
    yield from (_incident(known, group) for group in again)
    of_nodes = [one for one in known.incidents if _takes_node(one.incident)]
    alike = _grouped(of_nodes, lambda one: (one.incident.kind, _domain(known, one.incident)))
    for group in alike:
        yield from (_incident(known, together) for together in _at_once(group))


def _takes_node(incident: Incident) -> bool:
    return incident.severity is Severity.SEV1 and incident.node is not None


def _domain(known: Findings, incident: Incident) -> str:
    node = known.out.get(incident.node or "")
    return f"of {node.domain}" if node is not None else incident.id  # a node that is back is a cause of its own


def _at_once(group: Sequence[OngoingIncident]) -> list[list[OngoingIncident]]:
    """Divide incidents into those that were detected shortly after one another."""
    found: list[list[OngoingIncident]] = []
    for one in sorted(group, key=lambda one: one.incident.detected_at):
        before = found[-1][-1].incident if found else None
        if before is not None and one.incident.detected_at - before.detected_at <= TOGETHER:
            found[-1].append(one)
        else:
            found.append([one])
    return found


def _incident(known: Findings, group: Sequence[OngoingIncident]) -> Trouble:
    first = group[0].incident
    worst = max((one.incident for one in group), key=lambda incident: incident.stuck_s or 0.0)
    nodes = [one.incident.node for one in group if one.incident.node is not None]
    tasks = sorted({task for one in group for task in one.incident.tasks if task in known.tasks})
    workers, basis = _stands(group)
    short = sorted({span.task for one in group for span in one.short})
    is_open = any(one.incident.closed_at is None for one in group)
    out = known.out.get(first.node or "")
    state = "stuck" if worst.stuck_s is not None else "open" if is_open else out.state.value if out else "short"
    return Trouble(
        key=f"incident {first.id}",
        kind="incident",
        grave=is_open or out is not None,
        needs_somebody=worst.stuck_s is not None or any(node in known.out for node in nodes),
        state=state,
        what=f"{first.severity.value}: {first.kind.value} of {_place(known, group)}{_hits(tasks, short, is_open)}",
        todo=_todo(known, group, out),
        since=first.occurred_at,
        usual_s=worst.usual_s,
        late_s=worst.stuck_s,
        money_per_hour=_per_hour(known, workers),
        cost_basis=basis,
        incidents=[one.incident.id for one in group],
        tasks=tasks,
        nodes=nodes,
        owners=_owners(known.tasks[task] for task in tasks),
        **_who([one.incident for one in group]),
    )


def _place(known: Findings, group: Sequence[OngoingIncident]) -> str:
    first = group[0].incident
    if len(group) == 1 or not _takes_node(first):
        place = first.worker or first.node or first.task or "the cluster"
        return place if len(group) == 1 else f"{place}, {len(group)} times"
    found = [one.incident.node or "" for one in group]
    node = known.out.get(found[0])
    return f"{len(found)} nodes{f' of {node.domain}' if node is not None else ''}: {names(found)}"


def _hits(tasks: Sequence[str], short: Sequence[str], is_open: bool) -> str:
    if not is_open:
        return f"; healed, but {names(short)} has fewer workers" if short else "; its tasks are healed"
    return f"; hits {names(tasks)}" if tasks else ""


def _stands(group: Sequence[OngoingIncident]) -> tuple[float, str]:
    """Return how many workers' time is lost now, and what that is in words."""
    counted = sum(one.lost_workers for one in group)
    if all(one.incident.closed_at is not None or one.incident.planned_at is not None for one in group):
        return counted, f"{_counted(counted, 'worker')} lost or standing still"
    return counted, f"{_counted(counted, 'worker')} standing still: no plan yet"


def _todo(known: Findings, group: Sequence[OngoingIncident], out: NodeView | None) -> list[str]:
    """Return what a post-mortem says there is to do, for the first of the group; tasks that failed are said apart."""
    first = group[0]
    incident = first.incident.model_copy(update={"failed_tasks": {}})
    waits = held_back(known.tasks[task] for task in incident.tasks if task in known.tasks)
    found = todo(incident, out.state if out else None, shortfalls(first.short, incident.closed_at), (), waits)
    if incident.closed_at is None and not all(check.ok for check in known.checks):
        found[:1] = ["Nothing heals it while the control plane is away."]
    elif out is not None and incident.stuck_s is None:
        return found[-1:]  # that the node is to be mended: what else there is follows from it
    return found


def _who(incidents: Sequence[IncidentFacts]) -> dict[str, Any]:
    """Return who takes care of it, or has written the newest note about it, and that note."""
    notes = sorted((note for one in incidents for note in one.notes), key=lambda note: note.at)
    taken = next((one.acknowledged.by for one in incidents if one.acknowledged is not None), None)
    note = notes[-1] if notes else None
    by = taken or (note.by if note else None)
    return {"by": by, "acknowledged": taken is not None, "note": note.text if note else None}


def _owners(tasks: Iterable[TaskView]) -> list[str]:
    return sorted({task.owner for task in tasks if task.owner})


# ---- tasks


def _failed(known: Findings) -> Iterator[Trouble]:
    for group in _grouped(known.failed, lambda one: _line(one.task.reason)):
        tasks = [one.task for one in group]
        ended = [task.ended_at for task in tasks if task.ended_at is not None]
        named = [task.name for task in tasks]
        incidents = {one.incident.id: one.incident for one in group if one.incident is not None}
        yield Trouble(
            key=f"failed {_line(tasks[0].reason)}",
            kind="task-failed",
            grave=True,
            needs_somebody=True,
            state="failed",
            what=f"{names(named)} failed: {_line(tasks[0].reason)}",
            todo=[_mend(group)],
            since=min(ended, default=None),
            money_per_hour=0.0,
            cost_basis="its workers are free for other tasks",
            incidents=[*incidents],
            tasks=named,
            owners=_owners(tasks),
            **_who([*incidents.values()]),
        )


def _mend(group: Sequence[FailedTask]) -> str:
    name = group[0].task.name
    each = "" if len(group) == 1 else ", and the others"
    return f"Mend the cause, then `unicron resume {name}`{each}; `unicron logs {name}` has its output."


def _waiting(known: Findings) -> Iterator[Trouble]:
    hit = {task for one in known.incidents for task in one.incident.tasks if one.incident.closed_at is None}
    hit |= {span.task for one in known.incidents for span in one.short}
    tasks = [task for name, task in known.tasks.items() if name not in hit]
    held = [task for task in tasks if task.wait is not None and task.name not in known.unwritten]
    yield from (_held(known, group) for group in _grouped(held, lambda task: _line(task.wait.reason)))  # type: ignore[union-attr]
    storage = [task for task in known.tasks.values() if _storage(known, task)]
    yield from (_cannot_write(known, group) for group in _grouped(storage, lambda task: _storage(known, task)))
    queued = [task for task in tasks if task.state is TaskState.QUEUED and task.wait is None]
    if queued:
        yield _queue(queued)


def _held(known: Findings, group: Sequence[TaskView]) -> Trouble:
    named = [task.name for task in group]
    reason = group[0].wait.reason if group[0].wait is not None else ""
    workers = sum(len(task.members) for task in group)
    return Trouble(
        key=f"waits {_line(reason)}",
        kind="task-waits",
        grave=True,
        needs_somebody=any(task.wait is not None and task.wait.until is None for task in group),
        state="waits",
        what=f"{names(named)} waits after failures: {_line(reason)}",
        todo=held_back(group)[:1],
        money_per_hour=_per_hour(known, workers),
        cost_basis=f"{_counted(workers, 'worker')} kept for it",
        tasks=named,
        owners=_owners(group),
    )


def _storage(known: Findings, task: TaskView) -> str:
    failure = task.checkpoint_failure
    return known.unwritten.get(task.name, "") or (_line(failure.reason) if failure is not None else "")


def _cannot_write(known: Findings, group: Sequence[TaskView]) -> Trouble:
    named = [task.name for task in group]
    done = [task for task in group if task.name in known.unwritten]
    waiting = sum(len(task.members) for task in done)  # none, where its workers are lent meanwhile
    since = [task.checkpoint_failure.at for task in group if task.checkpoint_failure is not None]
    basis = f"{_counted(waiting, 'worker')} waiting" if waiting else "its workers are free for other tasks"
    if not done:
        basis = "it trains on; a fault would cost the steps since"
    return Trouble(
        key=f"storage {_storage(known, group[0])}",
        kind="storage",
        grave=bool(done),
        needs_somebody=bool(done),
        state="cannot write",
        what=f"{names(named)} {'' if done else 'cannot write a checkpoint: '}{_storage(known, group[0])}",
        todo=["Mend the storage that the reason names, or its space; the next checkpoint that is written ends this."],
        since=min(since, default=None),
        money_per_hour=_per_hour(known, waiting),
        cost_basis=basis,
        tasks=named,
        owners=_owners(group),
    )


def _queue(group: Sequence[TaskView]) -> Trouble:
    named = [task.name for task in group]
    several = len(group) > 1
    reason = _line(group[0].queued_reason or group[0].reason)
    return Trouble(
        key="queue",
        kind="queue",
        grave=False,
        state="queued",
        what=f"{names(named)} {'wait' if several else 'waits'} for workers{f': {reason}' if reason else ''}",
        todo=[f"Wait, bring nodes back, or ask for fewer: `unicron change {named[0]} --min N`."],
        since=min(task.submitted_at for task in group),
        money_per_hour=0.0,
        cost_basis="no worker stands for it",
        tasks=named,
        owners=_owners(group),
    )


# ---- nodes and workers


def _unreachable(known: Findings) -> Iterator[Trouble]:
    seen = known.reachability
    cut_off = seen.cut_off_since is not None
    for group in _grouped(known.unreachable.values(), lambda node: "" if cut_off else node.domain):
        named = [node.name for node in group]
        where = "all nodes" if cut_off else f"{group[0].domain}" if len(group) > 1 else ""
        many = f"{len(group)} nodes of {where}" if len(group) > 1 and not cut_off else where
        witnesses = sorted({name for node in named for name in seen.unreachable[node].reached_by})
        by = names(name.removeprefix("@") for name in witnesses)
        yield Trouble(
            key=f"unreachable {'' if cut_off else group[0].domain}",
            kind="unreachable",
            grave=True,
            needs_somebody=True,
            state="unreachable",
            what=f"No heartbeats of {f'{many}: ' if many else ''}{names(named)}{f'; reached by {by}' if by else ''}",
            todo=[f"Look at the network between the control plane and {named[0]}; its ranks are kept, and train on."],
            since=min(seen.unreachable[name].since for name in named),
            cost_basis="not known: its ranks are kept, and mostly train on",
            nodes=named,
        )


def _reported(known: Findings) -> Iterator[Trouble]:
    """Yield what monitors report of nodes and nothing follows from: an operator has to say whether it is to count."""
    reports = [(node, one) for node, found in known.held.items() for one in found]
    for group in _grouped(reports, lambda each: (each[1].actor, each[1].key, each[1].severity)):
        node, first = group[0]
        named = [name for name, _ in group]
        said = f"{first.key}{f', {first.reason}' if first.reason else ''}"
        yield Trouble(
            key=f"reported {first.report}",
            kind="reported",
            grave=first.severity == "error",
            needs_somebody=True,
            state=first.severity,
            what=f"{first.actor} reports of {names(named)}: {said}; not acted on: {first.held}",
            todo=[f"Look at {node}; `unicron drain {node}` empties it, as the report would."],
            since=min(one.reported_at for _, one in group),
            cost_basis="not known: its ranks train on",
            nodes=named,
        )


def _preflights(known: Findings) -> Iterator[Trouble]:
    """Yield the nodes that their preflight keeps out, and those in use that it has shown to be slow since."""
    for node in (*(node for node in known.out.values() if node.preflight), *known.slow_nodes):
        name, kept_out = node.name, node.name in known.out
        do = (
            f"Mend it and start its agent again; `unicron return {name}` uses it as it is."
            if kept_out
            else f"Look at {name}; `unicron drain {name}` empties it, to be mended and measured again."
        )
        yield Trouble(
            key=f"preflight {name}",
            kind="reported",
            grave=False,
            needs_somebody=True,
            state="refused" if kept_out else "slow",
            what=f"The preflight of {name} {'was refused' if kept_out else 'has found it slow'}: {node.preflight}",
            todo=[do],
            cost_basis="not known: it is not used" if kept_out else "not known: its ranks train on",
            nodes=[name],
        )


def _slow(known: Findings) -> Iterator[Trouble]:
    slowed = [known.tasks[name] for name in {one.task for one in known.slow} if name in known.tasks]
    used = {member.worker: task for task in slowed for member in task.members}
    slow = [one for one in known.slow if one.worker in used and used[one.worker].name == one.task]
    for group in _grouped(slow, lambda one: (one.task, one.node)):
        task = used[group[0].worker]
        worst = max(group, key=lambda one: one.slowdown)
        workers = len(task.members) * (1.0 - 1.0 / worst.slowdown) if worst.slowdown > 1.0 else 0.0
        yield Trouble(
            key=f"slow {group[0].id}",
            kind="slow-workers",
            grave=False,
            state="slow",
            what=_slow_words(group, worst, task),
            todo=[
                f"Look at the device and other processes of {worst.node}; `unicron drain {worst.node}` moves its work."
            ],
            since=min(one.found_at for one in group),
            money_per_hour=_per_hour(known, workers),
            cost_basis=f"at most: all {_counted(len(task.members), 'worker')} of {task.name} wait for the slowest",
            slow_workers=[one.id for one in group],
            tasks=[task.name],
            nodes=[worst.node],
            owners=_owners([task]),
        )


def _slow_words(group: Sequence[SlowdownView], worst: SlowdownView, task: TaskView) -> str:
    verb = "is" if len(group) == 1 else "are up to"
    return f"{names(one.worker for one in group)} of {task.name} {verb} {worst.slowdown:.2f} times as slow as its peers"
