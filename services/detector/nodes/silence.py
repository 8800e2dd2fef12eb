"""Silent nodes: which are lost, with the event of the loss, which are unreachable, and whether all are. Pure.

Silence has three causes: the agent or its machine has ended, its link to NATS is cut, or the link of the control plane
is. ``docs/detector.md`` has the table of rules; their order here is that of ``_verdict``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from services.detector.incidents.faults import SERVICE
from services.detector.nodes import probing
from services.detector.nodes.probing import DETECTOR, ProbeQuestion
from services.detector.nodes.silence_limits import SilenceLimit, SilenceLimits, evidence
from services.detector.progress import hangs
from services.detector.state.cluster import DetectorState
from services.detector.state.node import MonitoredNode
from services.detector.state.task import MonitoredTask
from shared.events.evidence import Evidence
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, derived_id
from shared.messages.probes import Outcome
from shared.messages.reachability import Reachability, Unreachable
from shared.messages.signals import RECONNECT_GRACE_S

DECISION_FACTOR = 3.0
"""Multiple of ``node_timeout_s`` after which a node that witnesses reach is lost if a task cannot do without a decision
about it. A client that reconnects needs 2 s at most (``RECONNECT_GRACE_S``), a lost TCP segment three times that with
two losses in a row."""

UNANSWERED_S = 10.0
"""A node is lost if no witness has answered about it for this time although nodes speak. A TCP connection that was cut
for seconds repeats its segments up to this much later (its time-out has doubled meanwhile)."""

MAX_WITNESSES = 5
"""Most witnesses that are asked about a node at a time: a majority of them would have to fail in the same second."""

MAX_OWN_PROBES = 32
"""Most nodes that the detector probes itself at a time, each with several connections (``probes.CONNECTIONS``). A probe
of a machine that answers takes milliseconds, so hundreds of agents that end together are found within a second."""

ONE_FAULT_S = 60.0
"""Time after the isolation of a node within which its loss belongs to the same incident: a machine that is about to
fail loses its links first, and one that an operator restarts is lost later."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A node that is lost.

    Attributes:
        node: the node.
        reason: in words.
        limit_s: the silence that counted, seconds.
        details: further evidence, for the reader: the limit's source, and the answers of the witnesses.
    """

    node: MonitoredNode
    reason: str
    limit_s: float
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
        silent_s: how long each node has been silent.
        limits: the limits of the nodes that are silent at all.
        speaking: nodes that speak.
        apart: nodes that are not on the detector's own machine, whose link may be the one that is cut.
        witnesses: nodes that can probe, speak, are apart and are not isolated. An isolated node cannot reach some
            others because of its own links: what it reaches is reached, and its failures prove nothing.
        others_speak: whether nodes of older versions, which cannot probe, speak and are apart.
    """

    at: datetime
    silent_s: Mapping[str, float]
    limits: Mapping[str, SilenceLimit]
    speaking: Set[str]
    apart: Set[str]
    witnesses: list[str]
    others_speak: bool


def judge(state: DetectorState, limits: SilenceLimits, listening_since: datetime, now: datetime) -> Found:
    """Return the questions to ask, and the nodes that are lost; mark nodes that are silent and not lost.

    Args:
        state: the detector's.
        limits: thresholds.
        listening_since: no silence counts that lies before this time.
        now: the time.
    """
    found = Found()
    if _all_are_heard(state, limits, listening_since, now):
        state.cut_off_since, state.losing_since, state.link_may_be_cut = None, None, False
        return found
    look = _look(state, limits, listening_since, now)
    found.questions = _questions(state, limits, listening_since, look)
    for name, limit in look.limits.items():
        node, silent_s = state.nodes[name], look.silent_s[name]
        if silent_s < limit.ask_s:
            continue
        since = _evidence_since(node, listening_since)
        reason, limit_s, source = _ended(state, node, since), limit.ask_s, "ended"
        if reason is None and silent_s > limit.limit_s:
            reason, limit_s, source = _verdict(state, limits, node, since, look), limit.limit_s, limit.source
        if reason is not None:
            details = {"limit_source": source, **evidence(node.arrivals, silent_s)}
            witnesses = {w: str(o or "no answer") for w, o in probing.results(state, name, since).items()}
            found.lost.append(Lost(node, reason, limit_s, details | ({"witnesses": witnesses} if witnesses else {})))
        elif silent_s > max(limits.node_timeout_s, limit.limit_s) and node.unreachable_since is None:
            node.unreachable_since = node.heard_at or listening_since
            found.notes.append(f"node {name} is silent, and nothing shows that it is lost: its ranks are kept")
    _mark_cut_off(state, look, found)
    if _waits_for_more(state, limits, look, found.lost):
        found.lost = []
    return found


def _waits_for_more(state: DetectorState, limits: SilenceLimits, look: _Now, lost: Sequence[Lost]) -> bool:
    """Return whether further nodes may have been lost at the same moment as those that are known to be.

    Nodes that share a switch or a power supply fall silent together. One plan answers all that are logged together. If
    they were logged one by one, each plan would take the place of the one before, and thousands of ranks would be asked
    anew each time.

    The nodes of one event have sent their last heartbeats within one interval. So what was heard later than an interval
    after the first of these heartbeats was not hit, and a node that was silent long before was hit by something else.
    The others are waited for, until they are heard or lost, and for an interval at most. A loss is logged at once where
    it is the only one and no such node is overdue.
    """
    if not lost:
        state.losing_since = None
        return False
    state.losing_since = state.losing_since or look.at
    interval_s = limits.earliest_s(lost[0].node)
    longest_s = max(look.silent_s[one.node.name] for one in lost)
    known = {one.node.name for one in lost}
    unheard = [name for name, s in look.silent_s.items() if name not in known and abs(s - longest_s) <= interval_s]
    several = len(lost) > 1 or any(name in look.limits for name in unheard)
    if several and unheard and (look.at - state.losing_since).total_seconds() < interval_s:
        return True
    state.losing_since = None
    return False


def _mark_cut_off(state: DetectorState, look: _Now, found: Found) -> None:
    """Note whether no node is heard, or none on another machine, though there are some that are not lost.

    Only the first means that the control plane is cut off from all nodes. In the second case the link of its own
    machine may be the one that is cut, which nodes on that machine do not show.
    """
    left = look.silent_s.keys() - {one.node.name for one in found.lost}
    kept = {name for name in left if state.nodes[name].unreachable_since is not None}
    others = left - kept
    cut_off = bool(kept) and not others
    link = cut_off or (bool(kept & look.apart) and not others & look.apart)
    if cut_off and state.cut_off_since is None:
        found.notes.append("no node is heard, and none is known to be lost: the control plane may be cut off")
    elif link and not cut_off and not state.link_may_be_cut:
        found.notes.append("no node on another machine is heard: the link of the control plane's machine may be cut")
    state.cut_off_since = (state.cut_off_since or look.at) if cut_off else None
    state.link_may_be_cut = link


def heard(state: DetectorState, node: MonitoredNode, now: datetime) -> list[str]:
    """Note that a node is heard; return a line for the log if it was unreachable.

    The node was never given up: its ranks train on, and nothing is cleaned. If the link of the control plane's machine
    may have been cut, the other nodes get time to reconnect, too.
    """
    if node.unreachable_since is None or not node.present:
        return []
    silent_s = (now - node.unreachable_since).total_seconds()
    grace = timedelta(seconds=RECONNECT_GRACE_S)
    node.unreachable_since, node.adopted_until = None, now + grace
    state.cut_off_since = None
    if state.link_may_be_cut:
        state.link_may_be_cut = False
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


def _all_are_heard(state: DetectorState, limits: SilenceLimits, listening_since: datetime, now: datetime) -> bool:
    """Return whether no node is unreachable, or silent for so long that anything follows, as at almost every tick."""
    since: dict[float, datetime] = {}
    for node in state.nodes.values():
        if node.lost is not None or node.left:
            continue
        heartbeat, heard_at = node.heartbeat, node.heard_at
        if heartbeat is None or heard_at is None or node.unreachable_since is not None:
            return False
        interval_s = heartbeat.interval_s
        if interval_s not in since:
            since[interval_s] = now - timedelta(seconds=limits.earliest_s(node))
        if heard_at <= since[interval_s]:
            return False
    return True


def _look(state: DetectorState, limits: SilenceLimits, listening_since: datetime, now: datetime) -> _Now:
    # This is one loop without calls for an ordinary node, since ticks look at thousands of them.
    silent_s: dict[str, float] = {}
    own: dict[str, SilenceLimit] = {}
    speaking, apart, speaks_s, here = set(), set(), limits.speaks_s, limits.network
    for name, node in state.nodes.items():
        if node.lost is not None or node.left:
            continue
        heard_at = node.heard_at
        since = heard_at if node.excused_until is None else node.silent_since
        if since is None or since < listening_since:
            since = listening_since
        silent_s[name] = seconds = (now - since).total_seconds()
        if seconds >= limits.earliest_s(node):
            own[name] = limits.of(node)
        if heard_at is not None:
            if (seconds if since is heard_at else (now - heard_at).total_seconds()) <= speaks_s:
                speaking.add(name)
        if not here or node.network != here:
            apart.add(name)
    if not own:
        return _Now(now, silent_s, own, speaking, apart, [], False)  # no witness is needed
    impartial = (speaking & apart) - state.isolated.keys()
    able = {name for name in impartial if probing.can_probe(state, name)}
    return _Now(now, silent_s, own, speaking, apart, sorted(able), bool(impartial - able))


# ---- questions


def _questions(
    state: DetectorState, limits: SilenceLimits, listening_since: datetime, look: _Now
) -> list[ProbeQuestion]:
    """Return the questions that are due: about each silent node, to witnesses that have just been heard."""
    overdue = [name for name, limit in look.limits.items() if look.silent_s[name] >= limit.ask_s]
    due = [name for name in overdue if _is_due(state.nodes[name].asked_at, limits, look)]
    questions: list[ProbeQuestion] = []
    if due:
        asked = _choose(state, [name for name in look.witnesses if look.silent_s[name] < limits.ask_s])
        for name in due:
            node = state.nodes[name]
            node.asked_at = look.at
            if asked and node.asked_since is None:
                node.asked_since = look.at
        questions = probing.ask(state, asked, due, look.at, limits.probe_timeout_s)
    for name in _probed_next(state, overdue, limits, listening_since, look):
        # One by one: an agent that has ended is known before an agent that is silent.
        questions += probing.ask(state, [DETECTOR], [name], look.at, limits.probe_timeout_s)
    return questions


def _probed_next(
    state: DetectorState, overdue: Sequence[str], limits: SilenceLimits, listening_since: datetime, look: _Now
) -> list[str]:
    """Return the nodes that the detector probes itself now.

    A few tell whether its own link works, and a machine that is merely busy is not to be probed without need. Once one
    of them is known to have ended, others may have ended with it: those that were not probed in this silence are next,
    so that all of these losses are known before the first one is logged.
    """
    ended = {
        name
        for name in overdue
        if _ended(state, state.nodes[name], _evidence_since(state.nodes[name], listening_since)) is not None
    }
    if not ended:
        overdue = overdue[:MAX_OWN_PROBES]
    due: list[str] = []
    again: list[str] = []
    pending = 0
    for name in overdue:
        node = state.nodes[name]
        since, at = _evidence_since(node, listening_since), node.witnesses.get(DETECTOR)
        if at is None or at <= since:
            due.append(name)
        elif probing.is_pending(state, DETECTOR, name, since):
            pending += 1
        elif _is_due(at, limits, look) and name not in ended:
            again.append(name)
    return [*due, *again][: max(0, MAX_OWN_PROBES - pending)]


def _is_due(asked_at: datetime | None, limits: SilenceLimits, look: _Now) -> bool:
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


def _ended(state: DetectorState, node: MonitoredNode, since: datetime) -> str | None:
    """Return why a node is lost whose agent is known to have ended; None if that is not known.

    No time-out has to pass: the detector itself has found the agent's port refused and the agent's connection to NATS
    gone (``prober.py``). What a witness alone has found may be due to its own network, and counts with the silence.
    """
    found = probing.results(state, node.name, since).get(DETECTOR)
    return "no heartbeat, and its machine answers without an agent" if found is Outcome.ABSENT else None


def _verdict(
    state: DetectorState, limits: SilenceLimits, node: MonitoredNode, since: datetime, look: _Now
) -> str | None:
    """Return why a node that is silent for longer than its limit is lost; None if it is not.

    Before ``node_timeout_s`` a node is lost only if witnesses have found its machine silent, or without an agent. An
    agent that takes connections and says nothing may only wait for a CPU.
    """
    silent_s, task = look.silent_s[node.name], _needed_by(state, limits, node, look)
    reached = node.reached_at is not None and node.reached_at >= since
    if reached and (look.at - since).total_seconds() <= limits.node_timeout_s:  # a witness has just reached the agent
        return f"cut off from the control plane, and task {task} cannot go on without a decision" if task else None
    is_late = silent_s > limits.node_timeout_s
    found = probing.results(state, node.name, since)
    answers = {witness: outcome for witness, outcome in found.items() if witness not in state.isolated}
    if Outcome.ABSENT in answers.values():
        return "no heartbeat, and its machine answers without an agent"
    if is_late and Outcome.MUTE in answers.values():  # the agent is stopped, hangs, or has had no CPU for so long
        return "no heartbeat, and no answer from its agent within the limit, though its machine answers"
    if not probing.can_probe(state, node.name):
        return "no heartbeat" if is_late and _may_lose_unprobed(state, node, look) else None
    pending = [w for w in (*look.witnesses, DETECTOR) if probing.is_pending(state, w, node.name, since)]
    silent = any(answers.get(witness) is Outcome.SILENT for witness in look.witnesses)
    if not pending and silent and Outcome.MUTE not in answers.values():
        return "no heartbeat, and no witness reaches it"
    if is_late and not look.witnesses and look.others_speak:
        return "no heartbeat"
    if look.witnesses and node.asked_since is not None:
        unanswered_s = (look.at - max(node.asked_since, since)).total_seconds()
        if unanswered_s > max(UNANSWERED_S, limits.node_timeout_s):
            return "no heartbeat, and no witness answers"
    return f"no heartbeat, and task {task} cannot go on without a decision" if task else None


def _may_lose_unprobed(state: DetectorState, node: MonitoredNode, look: _Now) -> bool:
    """Return whether the silence of a node that cannot be probed is enough.

    The silence is enough while others speak. Where none does, two kinds of nodes are kept, since they may be cut off
    with the control plane: a node that has not been heard since the detector began to listen (the log of an older
    version does not say where it is), and a node of an older version, as long as there is a node that could be probed.
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


def event_id_of_loss(node: MonitoredNode) -> str:
    """Return the id of the event that says that a node is lost, in its present time in the cluster."""
    return derived_id(node.joined, SERVICE, "lost")


def node_lost(
    state: DetectorState, node: MonitoredNode, *, now: datetime, reason: str, limit_s: float, **details: Any
) -> ErrorDetected:
    """Return the error event of a lost node, with the tasks that have workers on the node. ``details``: evidence.

    If the node has not been heard since the detector began to listen, nobody knows for how long it had been silent.
    """
    event_id = event_id_of_loss(node)
    silent_since = min(node.heard_at or state.listening_since, now)
    silent_s = (now - silent_since).total_seconds()
    heard = {"last_heartbeat_at": silent_since.isoformat(), "silence_s": silent_s}
    left_out = state.isolated.get(node.name)
    same_fault = left_out is not None and (now - left_out.since).total_seconds() <= ONE_FAULT_S
    evidence = Evidence(incarnation=node.incarnation, tasks=state.lost_ranks(node))
    return ErrorDetected(
        event_id=event_id,
        occurred_at=silent_since,
        incident=left_out.error if left_out is not None and same_fault else event_id,
        kind=ErrorKind.NODE_LOST,
        severity=Severity.SEV1,
        method=Method.NODE_HEALTH,
        detected_at=now,
        node=node.name,
        evidence=evidence.mapping(
            reason=reason,
            **(heard if node.heard_at is not None else {"listened_s": silent_s}),
            limit_s=limit_s,
            **details,
        ),
    )
