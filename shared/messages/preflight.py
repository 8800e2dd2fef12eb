"""Messages by which an agent tells the detector what its preflight has measured: core NATS.

An agent with the setting ``preflight`` sends a ``PreflightReport`` before it joins, and when its node is tested before
it is used again. The detector judges it, and what it has decided is in the log before the agent has the answer.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shared.bus.endpoints import Endpoint
from shared.bus.messages import Integer, Message, MessageId
from shared.events.measurements import Measurement, Verdict
from shared.names import Label, Name


class PreflightReport(Message):
    """What an agent has measured on its node.

    ``report``: an id of its own, by which a report that is sent again is known. The node is described as in
    ``shared.messages.signals.Heartbeat``: one that is refused sends none that counts.
    """

    node: Name
    incarnation: MessageId
    report: MessageId
    agent_pid: Integer
    supervisor: Label = ""
    domain: Label = "default"
    hardware: Label = "cpu"
    workers: Annotated[list[str], Field(max_length=1024)]
    measurement: Measurement


class PreflightAnswer(Message):
    """The detector's answer. ``reason``: why it refuses the node, or compares it with nothing; for people."""

    verdict: Verdict
    reason: str = ""


PREFLIGHT = Endpoint(
    "unicron.preflight.*",
    PreflightReport,
    PreflightAnswer,
    by=("node",),
    to=("detector",),
    timeout_s=3.0,
    names_sender=True,
)
"""The detector answers after one append to the log; a busy machine has a hundred times the few milliseconds of that."""
