"""Which nodes are sent commands: not those that are lost, have left or were blamed, until they are back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected
from tests.transition.drive import Drive, change, stage


def prepares(drive: Drive) -> list[str]:
    drive.plan("p", change(action="move", from_generation=0, prepare=["n2/0"], target=stage(1, ["n2/0"], "initial")))
    return drive.kinds()


@pytest.mark.parametrize("goes", [Drive.lose, Drive.leave])
def test_a_node_without_an_agent_is_not_back_because_a_user_wants_it(goes: Callable[[Drive, str], None]) -> None:
    drive = Drive()
    goes(drive, "n2")
    drive.put_back("n2")
    assert prepares(drive) == []


def test_a_node_that_an_escalation_blamed_is_sent_commands_again() -> None:
    """The escalation of a lost node's incident has its kind, and blames a node whose agent lives."""
    drive = Drive()
    escalation = ErrorDetected(
        event_id="escalation",
        occurred_at=drive.at,
        detected_at=drive.at,
        incident="i",
        kind=ErrorKind.NODE_LOST,
        severity=Severity.SEV1,
        method=Method.TRANSITION,
        node="n2",
        escalates="first",
    )
    drive.log(escalation)
    drive.put_back("n2")
    assert prepares(drive) == ["prepare@n2"]
