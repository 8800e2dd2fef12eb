"""Preflights: what nodes have measured is judged, and a node that is slow does not join. Pure.

A node is compared with what is published of its hardware, or with the newest preflights of the other nodes that are
like it (``shared.preflight.judgement``). One that is refused stays out with its figures, whatever agent of its
supervisor sends heartbeats, until it is measured anew or an operator returns it (``node.returned``). Nothing that is in
use is taken out of use: there, a refusal makes the self-test fail that the agent is being asked for, and a node that is
slow beside others that came later is only said to be so.
"""

from __future__ import annotations

from services.detector.decisions.decision import Decision
from services.detector.incidents.faults import SERVICE
from shared.events.measurements import Measurement
from shared.events.union import NodeLeft, NodeMeasured, derived_id
from shared.messages.admission import Departure
from shared.messages.preflight import PreflightAnswer, PreflightReport
from shared.messages.signals import Heartbeat
from shared.model import filled
from shared.preflight.judgement import judge


def take(decision: Decision, report: PreflightReport) -> PreflightAnswer:
    """Judge a report; return the answer, for when the decision is in the log."""
    event_id = derived_id(report.report, SERVICE, "measured")
    known = decision.state.preflights.get(report.node)
    if known is None or known.event.event_id != event_id:
        others = [one.event.measurement for name, one in decision.state.preflights.items() if name != report.node]
        found = judge(report.measurement, others)
        verdict, reason = found.verdict, found.reason
        if verdict == "refused" and known is not None and known.overruled:
            if known.is_of(report.incarnation, report.supervisor):
                verdict, reason = "reported", f"an operator uses the node all the same: {reason}"
        decision.add(
            filled(
                NodeMeasured,
                report,
                event_id=event_id,
                occurred_at=decision.now,
                measurement=report.measurement.model_copy(update={"rates": found.rates}),
                verdict=verdict,
                reason=reason,
            )
        )
        known = decision.state.preflights[report.node]
        _judge_again(decision, event_id, report.measurement)
    return PreflightAnswer(verdict=known.event.verdict, reason=known.event.reason)


def _judge_again(decision: Decision, cause: str, measured: Measurement) -> None:
    """Say which nodes are slow that joined while too few like them were known, now that one more is."""
    preflights = decision.state.preflights
    for name, known in list(preflights.items()):
        event = known.event
        if event.verdict != "reported" or known.overruled or not event.measurement.rates:
            continue
        if not event.measurement.is_like(measured):
            continue
        found = judge(event.measurement, [one.event.measurement for other, one in preflights.items() if other != name])
        if found.verdict == "refused":
            changes = {"event_id": derived_id(cause, SERVICE, f"slow {name}"), "occurred_at": decision.now}
            changes |= {"measurement": event.measurement.model_copy(update={"rates": found.rates})}
            decision.add(event.model_copy(update={**changes, "verdict": "slow", "reason": found.reason}))


def may_join(decision: Decision, heartbeat: Heartbeat) -> bool:
    """Return whether the preflight of a node lets it join. A refused one stays known under its present agent."""
    known = decision.state.preflights.get(heartbeat.node)
    if known is None or not known.refuses or not known.is_of(heartbeat.incarnation, heartbeat.supervisor):
        return True
    if known.event.incarnation != heartbeat.incarnation:
        event_id = derived_id(heartbeat.incarnation, SERVICE, "measured")
        changes = {"event_id": event_id, "occurred_at": decision.now, "agent_pid": heartbeat.agent_pid}
        decision.add(known.event.model_copy(update={**changes, "incarnation": heartbeat.incarnation}))
    return False


def left(decision: Decision, departure: Departure) -> None:
    """Note that a node leaves which was refused: it has never joined, and is to be looked for no more."""
    known = decision.state.preflights.get(departure.node)
    if known is None or not known.refuses or known.event.incarnation != departure.incarnation:
        return
    decision.add(
        NodeLeft(
            event_id=derived_id(known.event.event_id, SERVICE, "left"),
            occurred_at=decision.now,
            node=departure.node,
            incarnation=departure.incarnation,
            reason=departure.reason,
        )
    )
