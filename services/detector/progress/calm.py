"""Whether heartbeats show at once that nothing is wrong with a task, so that a tick need not judge its ranks. Pure.

The rules of ``absences.py``, ``script_ends.py``, ``hangs.py`` and ``standstill.py`` look at every rank. Ticks are many
and ranks are thousands, and almost always none of the rules finds anything. So what a node's newest heartbeat says of a
task is summed up once, and a tick looks at the summaries. A task that is not calm is judged by the rules themselves:
this module only says where their answer is known to be that there is nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from services.detector.incidents import absences
from services.detector.state import stalls
from services.detector.state.cluster import DetectorState
from services.detector.state.node import Ages, MonitoredNode, Place, Stand, Summary
from services.detector.state.stalls import StallLimits
from services.detector.state.task import MonitoredTask


def is_calm(state: DetectorState, task: MonitoredTask, limits: StallLimits, part: float = 1.0) -> bool:
    """Return whether no rank of a task is absent, and whether the task is far from every limit of a stall.

    A task stands still once the newest progress of all ranks is old: one rank with recent progress excludes that. A
    data-parallel rank is judged by itself, too, and so is each rank while a plan is carried out. Progress that an
    unreachable node has reported proves nothing of those that are heard.

    Args:
        state: the detector's.
        task: running, or with a plan in progress.
        limits: thresholds.
        part: the part of its limit for which the ranks have made no progress.
    """
    least_s = part * min(limits.hang_floor_s, limits.slow_region_timeout_s, stalls.SETUP_FLOOR_S)
    layout = task.layout
    each = task.change is not None or layout is None or layout.tensor == layout.pipeline == 1
    ages = _ages(state, task)
    if ages is None or (each and ages.oldest_s > least_s):
        return False
    return task.change is not None or ages.youngest_s <= least_s


def _ages(state: DetectorState, task: MonitoredTask) -> Ages | None:
    """Return the times without progress of a task's ranks, over all nodes; None if not all that is heard is usual.

    They are looked for once in a tick.
    """
    if state.ages is not None and task.name in state.ages:
        return state.ages[task.name]
    found = _found(state.nodes, task)
    if state.ages is not None:
        state.ages[task.name] = found
    return found


def _found(nodes: Mapping[str, MonitoredNode], task: MonitoredTask) -> Ages | None:
    youngest_s, oldest_s, name_of_task, generation = float("inf"), 0.0, task.name, task.generation
    for name, place in _places(task).items():
        node = nodes.get(name)
        if node is None or node.heartbeat is None or node.unreachable_since is not None:
            return None
        summary = node.summaries.get(name_of_task)
        if summary is None or summary.place is not place or summary.generation != generation:
            summary = _of(node, task, place)
        if not summary.is_usual:
            return None
        if summary.youngest_s < youngest_s:
            youngest_s = summary.youngest_s
        if summary.oldest_s > oldest_s:
            oldest_s = summary.oldest_s
    return Ages(youngest_s, oldest_s)


def summaries(state: DetectorState, task: MonitoredTask) -> Iterator[Summary]:
    """Yield what is heard of a task, by nodes in the order of their ranks. A tick has summed up most of it before."""
    places = _places(task)
    for name in task.nodes():
        node = state.nodes.get(name)
        if node is not None and node.heartbeat is not None:
            yield _of(node, task, places[name])


def _of(node: MonitoredNode, task: MonitoredTask, place: Place) -> Summary:
    """Return the summary of a node that was heard, which is made once for each heartbeat."""
    known = node.summaries.get(task.name)
    if known is None or known.place is not place or known.generation != task.generation:
        known = node.summaries[task.name] = _summary(node, task, place)
    return known


def _places(task: MonitoredTask) -> Mapping[str, Place]:
    """Return the workers that matter to a task now, by node.

    They are listed once for each plan. An error that is known since excuses further workers, and only makes the task
    seem less calm than it is.
    """
    known = task.places
    if known is None or known[0] is not task.members or known[1] is not task.change:
        found: dict[str, Place] = {}
        expected = frozenset(absences.expected(task))
        for worker in {**dict.fromkeys(task.members), **dict.fromkeys(task.concerned())}:
            place = found.setdefault(worker.rpartition("/")[0], Place([], []))
            (place.expected if worker in expected else place.others).append(worker)
        known = task.places = (task.members, task.change, found)
    return known[2]


def _summary(node: MonitoredNode, task: MonitoredTask, place: Place) -> Summary:
    assert node.heartbeat is not None
    name, statuses = task.name, node.heartbeat.statuses
    is_usual, youngest_s, oldest_s = True, float("inf"), 0.0
    stands: dict[Stand, list[str]] = {}
    for worker in place.expected:
        status = statuses.get(worker)
        if status is None or status.task != name or (status.generation or 0) < task.generation:
            is_usual = False
            break
    for worker in (*place.expected, *place.others):
        status = statuses.get(worker)
        if status is None or status.task != name:
            continue
        phase = status.phase
        stand = (status.state, phase, status.step, status.micro_batch, status.process_state)
        if worker in task.members:
            stands.setdefault(stand, []).append(worker)
        if phase == "tail" or status.process_state in stalls.STOPPED:
            is_usual = False
        age_s = stalls.own_age_s(status) or 0.0  # of a rank that never made progress, nothing follows
        if age_s < youngest_s:
            youngest_s = age_s
        if age_s > oldest_s and not (phase == "waiting" and status.state == "waiting"):
            oldest_s = age_s
    return Summary(place, task.generation, stands, is_usual, youngest_s, oldest_s)
