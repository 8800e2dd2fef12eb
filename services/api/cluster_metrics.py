"""Metrics of the cluster: what the projections and the heartbeats say when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import get_args

from prometheus_client.metrics_core import Metric

from services.api import present
from services.api.live import LiveState
from services.api.postmortem.gather import lateness
from services.api.store.accounts import Accounts
from services.api.store.readers import ViewReader
from services.api.store.tables import INCIDENTS, NODES, SPANS, TASKS
from shared.costs.ledger import CATEGORIES
from shared.costs.report import categories
from shared.costs.settlement import ALL, no_amounts
from shared.events.observed_events import AnomalyKind
from shared.events.severities import Severity
from shared.interface.models import Task
from shared.service.metrics import Samples, gauge
from shared.tasks.specification import GOING_ON, TaskState
from shared.views.documents import ClusterView, IncidentView, NodeState, NodeView, TaskView

FAILED_FOR = timedelta(days=1)
"""For how long a failed task has a series, unless it is resumed or deleted before: somebody looks within a day."""

MOST_FAILED = 100
"""Failed tasks that have one, the newest: where there are more, it is one cause."""

AWAY = (NodeState.LOST.value, NodeState.ISOLATED.value, present.UNREACHABLE)
"""States of nodes that have a series by name: those that somebody has to look at."""


@dataclass(frozen=True)
class Facts:
    """What the projections have at one position. ``worker_s``: allocated worker-seconds by kind of time.

    ``failed``: tasks that failed of late, and nobody has resumed or deleted. ``stuck``: number of open incidents that
    take longer than their kind usually does.
    """

    tasks: Sequence[TaskView]
    failed: Sequence[str]
    nodes: Sequence[NodeView]
    open_incidents: Sequence[IncidentView]
    stuck: int
    cluster: ClusterView
    healthy_flop_per_s: float
    worker_s: dict[str, float]


def read_facts(views: ViewReader, cluster: ClusterView, now: datetime) -> Facts:
    """Read what the metrics are made of. The time it takes does not grow with the history."""
    healthy = views.get(SPANS, cluster.healthy) if cluster.healthy else None
    whole = Accounts(views, now).account(limit=1).sums[ALL].get("", no_amounts())
    incidents = views.page(INCIDENTS, states=["open"])
    return Facts(
        tasks=views.page(TASKS, states=GOING_ON),
        failed=sorted(task.name for task in failed_of_late(views, now)),
        nodes=views.known(NODES, lambda: views.page(NODES)),
        open_incidents=incidents,
        stuck=sum(lateness(cluster, view, now)[1] is not None for view in incidents),
        cluster=cluster,
        healthy_flop_per_s=sum(healthy.waf.values()) if healthy is not None else 0.0,
        worker_s=categories(whole),
    )


def failed_of_late(views: ViewReader, now: datetime) -> list[TaskView]:
    """Return the tasks that have failed of late, the newest first."""
    newest = views.page(TASKS, states=[TaskState.FAILED.value], newest=True, limit=MOST_FAILED)
    return [task for task in newest if task.ended_at is not None and now - task.ended_at <= FAILED_FOR]


def cluster_metrics(facts: Facts, live: LiveState) -> Iterator[Metric]:
    """Yield the metrics of the cluster, its tasks and its costs."""
    tasks = [present.task(view, live) for view in facts.tasks]
    yield from _incidents(facts.open_incidents)
    text = "Open incidents that take longer than those of their kind usually do."
    yield gauge("unicron_incidents_stuck", text, facts.stuck)
    yield from _nodes(facts.nodes, live, tasks)
    yield from _tasks(tasks)
    text = "1 of a task that has failed within the last day, until it is resumed or deleted."
    yield gauge("unicron_task_failed", text, {(name,): 1.0 for name in facts.failed}, "task")
    text = "1 of a task whose steps are all done, and which waits until it can write its result."
    waiting: Samples = {(view.name,): 1.0 for view in facts.tasks if present.waits_for_storage(view, live)}
    yield gauge("unicron_task_waits_for_storage", text, waiting, "task")
    text = "1 of a task of which in-memory copies are missing that a recovery would rely on."
    lacking: Samples = {(task.name,): 1.0 for task in tasks if task.copies_lacking is not None}
    yield gauge("unicron_task_copies_lacking", text, lacking, "task")
    waf = sum(task.waf_flop_per_s for task in tasks)
    yield gauge("unicron_waf_flop_per_second", "Weighted model FLOP/s that all tasks achieve.", waf)
    text = "The same of the best plan for these tasks on all allocated workers."
    yield gauge("unicron_waf_healthy_flop_per_second", text, facts.healthy_flop_per_s)
    kinds: Samples = {(kind,): facts.worker_s[kind] for kind in dict.fromkeys(CATEGORIES.values())}
    text = "Allocated worker-seconds so far, by what they went into. Later events may move some to another kind."
    yield gauge("unicron_worker_seconds", text, kinds, "kind")
    price: Samples = {(facts.cluster.currency,): facts.cluster.price_per_worker_hour}
    yield gauge("unicron_worker_hour_price", "Price of a worker for an hour.", price, "currency")


def _incidents(found: Iterable[IncidentView]) -> Iterator[Metric]:
    counts = Counter(view.severity for view in found)
    values: Samples = {(severity.value,): float(counts[severity]) for severity in Severity}
    yield gauge("unicron_incidents_open", "Incidents whose tasks are not back at planned strength.", values, "severity")


def _nodes(nodes: Sequence[NodeView], live: LiveState, tasks: Sequence[Task]) -> Iterator[Metric]:
    counts: Counter[str] = Counter(present.node_state(view, live) for view in nodes)
    away: Samples = {
        (view.name, state): 1.0 for view in nodes if (state := str(present.node_state(view, live))) in AWAY
    }
    yield gauge("unicron_node_away", "1 of a node that is lost, isolated or unreachable.", away, "node", "state")
    states = [*(state.value for state in NodeState), present.UNREACHABLE]
    yield gauge("unicron_nodes", "Nodes.", {(state,): float(counts[state]) for state in states}, "state")
    allocated = sum(len(view.workers) for view in nodes if view.allocated_since is not None)
    yield gauge("unicron_workers_allocated", "Workers that cost money.", allocated)
    yield gauge("unicron_workers_used", "Workers that train a task.", sum(task.workers for task in tasks))
    slow: Samples = {(one.worker,): one.slowdown for view in nodes for one in view.slow}
    text = "Own compute time of a slow worker over that of its peers; workers that are as fast have no series."
    yield gauge("unicron_worker_slowdown", text, slow, "worker")


def _tasks(tasks: Sequence[Task]) -> Iterator[Metric]:
    counts = Counter(task.state.value for task in tasks)
    anomalies: dict[tuple[str, ...], float] = {
        (task.name, kind): 0.0 for task in tasks for kind in get_args(AnomalyKind)
    }
    for task in tasks:
        for anomaly in task.anomalies:
            anomalies[task.name, anomaly.kind] += 1.0
    yield gauge("unicron_task_anomalies", "Numbers of a task that are unusual now.", anomalies, "task", "kind")
    by_state = {(name,): float(counts[name]) for name in GOING_ON}
    yield gauge("unicron_tasks", "Tasks that have not ended.", by_state, "state")
    for name, text, values in (
        ("unicron_task_workers", "Workers of a task.", {task.name: float(task.workers) for task in tasks}),
        ("unicron_task_steps", "Updates that a task has applied.", {task.name: float(task.step) for task in tasks}),
        (
            "unicron_task_step_seconds",
            "Duration of a task's recent steps.",
            {task.name: task.step_s for task in tasks if task.step_s is not None},
        ),
        (
            "unicron_task_waf_flop_per_second",
            "Weighted model FLOP/s that a task achieves.",
            {task.name: task.waf_flop_per_s for task in tasks},
        ),
    ):
        yield gauge(name, text, {(task,): value for task, value in values.items()}, "task")
