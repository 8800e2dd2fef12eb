"""A task that waits after failures: what ``unicron show`` says of it, and ``unicron resume``."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from shared.events.plans import Response, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, PlanDecided, TaskResumeRequested
from tests.api.kit import Server, restart
from tests.cli.conftest import Unicron

AT = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize("given_up", [True, False])
async def test_a_wait_is_shown_and_can_be_ended(api: Server, unicron: Unicron, given_up: bool) -> None:
    assert (await api.http.post("/v1/tasks", json=api.spec())).status_code == 201
    if given_up:
        recorded = await api.append(
            ErrorDetected,
            task="gpt",
            incident="i1",
            kind=ErrorKind.EXCEPTION,
            severity=Severity.SEV2,
            method=Method.EXCEPTION,
            detected_at=AT,
            evidence={"needs_operator": "it has failed 25 times"},
        )
    else:
        change = restart().model_copy(update={"not_before": AT, "reason": "restarted after 8 s"})
        recorded = await api.append(
            PlanDecided, plan="p1", trigger=Trigger.ERROR, cause="x", response=Response.RESTART, changes=[change]
        )
    await api.projected(recorded.position)
    shown = (await unicron("show", "gpt")).out
    if given_up:
        assert "until `unicron resume gpt`: it has failed 25 times" in shown
    else:
        assert "until 2030-01-01 12:00:00" in shown
        assert ", or `unicron resume gpt`: restarted after 8 s" in shown
    assert (await unicron("resume", "gpt")).code == 0
    assert isinstance(api.journal.log.read()[-1].event, TaskResumeRequested)
    assert "unicron resume" not in (await unicron("show", "gpt")).out
    refused = await unicron("resume", "gpt")
    assert refused.code == 4
    assert "waits after failures can be resumed" in refused.err
