"""Silent nodes: which are lost, which are only unreachable, and whether the control plane itself is cut off. Pure.

Silence has three causes: the agent or its machine has ended, its link to NATS is cut, or the link of the control plane
is. ``docs/detector.md`` has the table of rules; their order here is that of ``_verdict``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from services.detector import hangs, probing
from services.detector.probing import DETECTOR, ProbeQuestion
from services.detector.stalls import StallLimits
from services.detector.state import DetectorState, MonitoredNode, MonitoredTask
from shared.probes import PROBE_TIMEOUT_S, Outcome
from shared.reachability import Reachability, Unreachable
from shared.signals import RECONNECT_GRACE_S

ASK_FRACTION = 0.25
"""Witnesses are asked about a node once it has been silent for this part of ``node_timeout_s``, and again at this
interval. With ``PROBE_FRACTION`` the first answers are there before the time-out, so that witnesses delay no loss."""

PROBE_FRACTION = 2 / 3
"""Time-out of a probe, as a part of ``node_timeout_s``: 1 s of 1.5 s (``PROBE_TIMEOUT_S`` has the reason), and at most
that."""

OVERDUE_INTERVALS = 1.5
"""Heartbeat intervals after which a node counts as silent at the earliest: one, and a half for a busy machine."""

SPEAKS_FRACTION = 0.5
"""A node speaks if it was heard within this part of ``node_timeout_s``. Of nodes that fall silent together none speaks
any more when the first one reaches the time-out."""

DECISION_FACTOR = 3.0
"""Multiple of ``node_timeout_s`` after which a node that witnesses reach is lost if a task cannot do without a decision
about it. A client that reconnects needs 2 s at most (``RECONNECT_GRACE_S``), a lost TCP segment three times that with
two losses in a row."""

UNANSWERED_S = 10.0
"""A node about which no witness has answered for this time, though nodes speak, is lost. A TCP connection that was cut
for seconds repeats its segments up to this much later (its time-out has doubled meanwhile)."""

MAX_WITNESSES = 5
"""Witnesses asked about a node at a time: a majority of them would have to fail in the same second."""

MAX_OWN_PROBES = 32
"""Nodes that the detector probes itself at a time. It asks whether *its* link works, for which a few are enough."""

ENDED = frozenset({Outcome.ABSENT, Outcome.MUTE})
"""Outcomes which show that the machine was reached, and that no agent works there."""


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """Thresholds, and the detector's own place.

    Attributes:
        heartbeat_interval_s: of agents.
        node_timeout_s: silence after which a node is lost or unreachable.
        stalls: thresholds for ranks that stand still.
        network: the detector's network stack (``shared.network``).
    """

    heartbeat_interval_s: float
    node_timeout_s: float
    stalls: StallLimits
    network: str = ""

    @property
    def ask_s(self) -> float:
        """Silence after which witnesses are asked about a node, and the interval between two questions."""
        return max(ASK_FRACTION * self.node_timeout_s, OVERDUE_INTERVALS * self.heartbeat_interval_s)

    @property
    def speaks_s(self) -> float:
        """Silence up to which a node speaks."""
        return max(SPEAKS_FRACTION * self.node_timeout_s, self.ask_s)

    @property
    def probe_timeout_s(self) -> float:
        """Time-out of a probe."""
        return min(PROBE_FRACTION * self.node_timeout_s, PROBE_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Lost:
    """A node that is lost. ``reason``: in words. ``details``: further evidence, for the reader."""

    node: MonitoredNode
    reason: str
    details: dict[str, Any]


@dataclass(slots=True)
class Found:
    """What the silence of nodes calls for. ``notes``: lines for the detector's own log."""

    questions: list[ProbeQuestion] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Now:
    """One look at the nodes that count as alive.

    Attributes:
        at: the time.
        silent_s: by node.
        speaking: nodes that speak.
        apart: nodes that are not on the detector's own machine, whose link may be the one that is cut.
        witnesses: of those that speak, are apart and are not isolated, the ones that can probe. An isolated node cannot
            reach some others because of its own links: what it reaches is reached, and its failures prove nothing.
        others_speak: nodes of older versions, which cannot probe, speak and are apart.
    """

    at: datetime
    silent_s: Mapping[str, float]
    speaking: Set[str]
    apart: Set[str]
    witnesses: list[str]
    others_speak: bool


def judge(state: DetectorState, limits: SilenceLimits, listening_since: datetime, now: datetime) -> Found:
    """Return the questions to ask, and the nodes that are lost; mark nodes that are silent and not lost.

    Args:
        state: the detector's.
        limits: thresholds.
        listening_since: the silence of no node counts from before this time.
        now: the time.
    """
    found = Found()
    look = _look(state, limits, listening_since, now)
    found.questions = _questions(state, limits, look)
    for name, silent_s in look.silent_s.items():
        node = state.nodes[name]
        if silent_s <= limits.node_timeout_s:
            continue
        since = _evidence_since(node, listening_since)
        reason = _verdict(state, limits, node, since, look)
        if reason is None:
            if node.unreachable_since is None:
                node.unreachable_since = node.heard_at or listening_since
                found.notes.append(f"node {name} is silent, and nothing shows that it is lost: its ranks are kept")
        else:
            witnesses = {w: str(o or "no answer") for w, o in probing.results(state, name, since).items()}
            found.lost.append(Lost(node, reason, {"witnesses": witnesses} if witnesses else {}))
    _mark_cut_off(state, look, found)
    return found


def _mark_cut_off(state: DetectorState, look: _Now, found: Found) -> None:
    """Note whether the control plane is cut off: no node is heard, and there are some that are not lost."""
    left = look.silent_s.keys() - {one.node.name for one in found.lost}
    kept = {name for name in left if state.nodes[name].unreachable_since is not None}
    if not kept or look.apart & left - kept:
        state.cut_off_since = None
    elif state.cut_off_since is None:
        state.cut_off_since = look.at
        found.notes.append("no node is heard, and none is known to be lost: the control plane may be cut off")


def heard(state: DetectorState, node: MonitoredNode, now: datetime) -> list[str]:
    """Note that a node is heard; return a line for the log if it was unreachable.

    The node was never given up: its ranks train on, and nothing is cleaned. If the control plane was cut off, the other
    nodes get time to reconnect, too.
    """
    if node.unreachable_since is None or not node.present:
        return []
    silent_s = (now - node.unreachable_since).total_seconds()
    grace = timedelta(seconds=RECONNECT_GRACE_S)
    node.unreachable_since, node.adopted_until = None, now + grace
    if state.cut_off_since is not None:
        state.cut_off_since = None
        for other in state.nodes.values():
            if other.present:
                other.excused_until = now + grace
    return [f"node {node.name} is heard again after {silent_s:.1f} s: it is adopted with the ranks that it has"]


def reachability(state: DetectorState) -> Reachability:
    """Return which nodes are unreachable, for people."""
    silent = {n.name: n.unreachable_since for n in state.nodes.values() if n.present}
    return Reachability(
        unreachable={
            name: Unreachable(since=since, reached_by=sorted(_reached_by(state, name, since)))
            for name, since in silent.items()
            if since is not None
        },
        cut_off_since=state.cut_off_since,
    )


def _reached_by(state: DetectorState, name: str, since: datetime) -> list[str]:
    found = probing.results(state, name, since)
    return [witness for witness, outcome in found.items() if outcome is Outcome.REACHED]


def _look(state: DetectorState, limits: SilenceLimits, listening_since: datetime, now: datetime) -> _Now:
    silent_s = {}
    for node in state.nodes.values():
        if node.present:
            since = max(node.silent_since or listening_since, listening_since)
            silent_s[node.name] = (now - since).total_seconds()
    speaking = {name for name in silent_s if _speaks(state.nodes[name], limits, now)}
    apart = {name for name in silent_s if not _is_here(state.nodes[name], limits)}
    impartial = (speaking & apart) - state.isolated.keys()
    able = {name for name in impartial if probing.can_probe(state, name)}
    return _Now(now, silent_s, speaking, apart, sorted(able), bool(impartial - able))


def _speaks(node: MonitoredNode, limits: SilenceLimits, now: datetime) -> bool:
    return node.heard_at is not None and (now - node.heard_at).total_seconds() <= limits.speaks_s


def _is_here(node: MonitoredNode, limits: SilenceLimits) -> bool:
    """Return whether the node is on the detector's own machine."""
    return node.heartbeat is not None and bool(limits.network) and node.heartbeat.network == limits.network


# ---- questions


def _questions(state: DetectorState, limits: SilenceLimits, look: _Now) -> list[ProbeQuestion]:
    """Return the questions that are due: about each silent node, to witnesses that have just been heard."""
    due = [
        name
        for name, seconds in look.silent_s.items()
        if seconds >= limits.ask_s and _is_due(state, name, limits, look)
    ]
    if not due:
        return []
    fresh = [name for name in look.witnesses if look.silent_s[name] < limits.ask_s]
    asked = _choose(state, fresh)
    for name in due:
        node = state.nodes[name]
        node.asked_at = look.at
        if asked and node.asked_since is None:
            node.asked_since = look.at
    questions = probing.ask(state, asked, due, look.at, limits.probe_timeout_s)
    return questions + probing.ask(state, [DETECTOR], due[:MAX_OWN_PROBES], look.at, limits.probe_timeout_s)


def _is_due(state: DetectorState, name: str, limits: SilenceLimits, look: _Now) -> bool:
    asked_at = state.nodes[name].asked_at
    return asked_at is None or (look.at - asked_at).total_seconds() >= limits.ask_s


def _choose(state: DetectorState, candidates: Iterable[str]) -> list[str]:
    """Return the witnesses to ask, of as many failure domains as possible: a domain may share a broken link."""
    by_domain: dict[str, list[str]] = {}
    for name in candidates:
        heartbeat = state.nodes[name].heartbeat
        by_domain.setdefault(heartbeat.domain if heartbeat is not None else "", []).append(name)
    turns = sorted((turn, name) for names in by_domain.values() for turn, name in enumerate(sorted(names)))
    return [name for _, name in turns[:MAX_WITNESSES]]


# ---- verdicts


def _evidence_since(node: MonitoredNode, listening_since: datetime) -> datetime:
    """Return the time from which evidence against a node counts: it was heard, or a witness reached it, last then."""
    since = max(node.silent_since or listening_since, listening_since)
    return since if node.reached_at is None else max(since, node.reached_at)


def _verdict(
    state: DetectorState, limits: SilenceLimits, node: MonitoredNode, since: datetime, look: _Now
) -> str | None:
    """Return why a node that is silent for longer than the time-out is lost; None if it is not."""
    task = _needed_by(state, limits, node, look)
    if (look.at - since).total_seconds() <= limits.node_timeout_s:  # a witness has just reached the agent
        return f"cut off from the control plane, and task {task} cannot go on without a decision" if task else None
    found = probing.results(state, node.name, since)
    answers = {witness: outcome for witness, outcome in found.items() if witness not in state.isolated}
    if any(outcome in ENDED for outcome in answers.values()):
        return "no heartbeat, and its machine answers without an agent"
    if not probing.can_probe(state, node.name):
        return "no heartbeat" if _may_lose_unprobed(state, node, look) else None
    pending = [w for w in (*look.witnesses, DETECTOR) if probing.is_pending(state, w, node.name, since)]
    if not pending and any(answers.get(witness) is Outcome.SILENT for witness in look.witnesses):
        return "no heartbeat, and no witness reaches it"
    if not look.witnesses and look.others_speak:
        return "no heartbeat"
    if look.witnesses and node.asked_since is not None:
        unanswered_s = (look.at - max(node.asked_since, since)).total_seconds()
        if unanswered_s > max(UNANSWERED_S, limits.node_timeout_s):
            return "no heartbeat, and no witness answers"
    return f"no heartbeat, and task {task} cannot go on without a decision" if task else None


def _may_lose_unprobed(state: DetectorState, node: MonitoredNode, look: _Now) -> bool:
    """Return whether the silence of a node that cannot be probed is enough.

    It is while others speak. Where none does, a node that has not been heard since the detector began to listen is
    kept, and so is one of an older version, as long as there is a node that could be probed: both may be cut off with
    the control plane.
    """
    if look.witnesses or look.others_speak:
        return True
    return node.heartbeat is not None and not any(
        state.nodes[name].heartbeat is None or probing.can_probe(state, name) for name in look.silent_s
    )


def _needed_by(state: DetectorState, limits: SilenceLimits, node: MonitoredNode, look: _Now) -> str | None:
    """Return a task that has workers on the node and cannot go on without a decision about it; None if there is none.

    Nothing is decided while no node speaks that could show what works.
    """
    if not look.speaking or look.silent_s[node.name] <= DECISION_FACTOR * limits.node_timeout_s:
        return None
    for task in state.tasks.values():
        if task.ended or not any(w.startswith(f"{node.name}/") for w in task.concerned()):
            continue
        if _waits(task) or hangs.of_heard(state, task, limits.stalls) is not None:
            return task.name
    return None


def _waits(task: MonitoredTask) -> bool:
    """Return whether a plan for the task is under way or due, or ranks have reported broken sockets."""
    broken = task.suspicion is not None and task.suspicion.generation == task.generation
    return bool(task.unanswered) or task.change is not None or broken
