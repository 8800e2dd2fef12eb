"""Isolated nodes are tested before they return by themselves: their agent tests itself on request. Pure.

A node that was isolated, because of a link or of another fault, joins again (``node.joined``) only once its present
agent has passed the self-test (``shared/messages/self_test.py``), which is asked when nothing else keeps the node out.
A node that fails is asked again after a while, which doubles each time. The event has the findings of a test that was
passed, the detector's own log a failure. ``unicron return`` has the api ask for the same test.
"""

from __future__ import annotations

from services.detector.decisions.decision import Decision
from services.detector.nodes import isolation
from services.detector.state.cluster import DetectorState
from services.detector.state.unlogged import SelfTestQuestion, SelfTestState
from shared.events.node_events import CheckResult
from shared.messages.self_test import SelfTestResult
from shared.messages.signals import Heartbeat


def may_join(decision: Decision, heartbeat: Heartbeat) -> bool:
    """Return whether a node that nothing else keeps out may join; a question is put if that is not known yet.

    Only nodes that were isolated are tested: one that was lost, or is new, has to run ranks in any case.
    """
    state, now, name = decision.state, decision.now, heartbeat.node
    if name not in state.isolated and name not in state.condemned:
        return True
    known = state.self_tests.get(name)
    if known is None or known.incarnation != heartbeat.incarnation:
        known = state.self_tests[name] = SelfTestState(heartbeat.incarnation)
    if known.checks is not None:
        return True
    if known.next_at is None or now >= known.next_at:
        # If there is no answer, the node is asked again as if it had failed.
        known.next_at = now + known.pause
        peers = isolation.targets(state, name)
        decision.others.append(SelfTestQuestion(name, heartbeat.incarnation, peers, now))
    return False


def passed(state: DetectorState, name: str) -> list[CheckResult]:
    """Return what the self-test of a node that joins has found, and forget that: it is needed no more."""
    known = state.self_tests.pop(name, None)
    return known.checks or [] if known is not None else []


def take(state: DetectorState, question: SelfTestQuestion, result: SelfTestResult | None) -> list[str]:
    """Note the answer to a question; return what a person should read. None: there was no answer."""
    known = state.self_tests.get(question.node)
    if known is None or known.incarnation != question.incarnation:
        return []
    if result is not None and result.incarnation != question.incarnation:
        result = None
    problem = "its agent did not answer" if result is None else result.problem
    if result is not None and not problem:
        known.checks = list(result.checks)
        return []
    known.failures += 1
    known.next_at = question.asked_at + known.pause
    again_s = known.pause.total_seconds()
    return [f"node {question.node} stays isolated: self-test failed: {problem}; again after {again_s:g} s"]
