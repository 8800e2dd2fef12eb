"""Events of nodes: how they join and leave, and what users want of them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from shared.events.base import NodeEvent
from shared.events.measurements import Measurement, Verdict
from shared.model import Model


class CheckResult(Model):
    """What one named check of a self-test found.

    ``value``, ``bound``: the measured number and its limit, in ``unit``; None: there is no number. ``detail``: the
    finding in words.
    """

    name: str
    ok: bool
    value: float | None = None
    bound: float | None = None
    unit: str = ""
    detail: str = ""

    def __str__(self) -> str:
        """Return the check in words."""
        if self.value is None:
            return f"{self.name}: {self.detail}"
        bound = f", allowed {self.bound:g}" if self.bound is not None else ""
        return f"{self.name}: {self.value:g} {self.unit}{bound}{f' ({self.detail})' if self.detail else ''}"


class NodeJoined(NodeEvent):
    """A node, or a new incarnation of a node, offers workers.

    ``domain``: the failure domain of the node, for example its rack. ``hardware``: the kind of its workers, which names
    a profile of the throughput model. ``supervisor``: id of the process that starts the node's agents again; empty: the
    agent has an older version, without a supervisor. ``self_test``: the checks that an isolated node has passed.
    ``probe``, ``network``: where its agent answers probes, and its network stack, as in
    ``shared.messages.signals.Heartbeat``; empty: before they were recorded.
    """

    type: Literal["node.joined"] = "node.joined"
    schema_version: Literal[1] = 1
    incarnation: str
    agent_pid: int
    domain: str
    workers: list[str]
    hardware: str = "cpu"
    supervisor: str = ""
    self_test: list[CheckResult] = Field(default_factory=list)
    probe: str = ""
    network: str = ""


class NodeAdopted(NodeEvent):
    """A node has another agent, which its supervisor has started in place of one that ended; its processes stay.

    ``incarnation``: that of the new agent. ``predecessor``: that of the agent before. ``probe``: as in ``node.joined``.
    """

    type: Literal["node.adopted"] = "node.adopted"
    schema_version: Literal[1] = 1
    incarnation: str
    predecessor: str
    agent_pid: int
    probe: str = ""


class NodeCordoned(NodeEvent):
    """A user wants no new work on the node; what runs there stays. The wish holds until ``node.returned``.

    ``actor``: who, ``uid/<uid>`` or ``token/<name>``; empty: before actors were recorded.
    """

    type: Literal["node.cordoned"] = "node.cordoned"
    schema_version: Literal[1] = 1
    reason: str = ""
    actor: str = ""


class NodeDraining(NodeEvent):
    """The node is to be emptied: tasks move away at a step boundary, and no new work is placed on it.

    ``by``: a user, whose wish holds until ``node.returned``, or the node's agent, which leaves when the node is empty.
    ``timeout_s``: how long tasks may take to move away. ``save``: whether that time is over: a task that is still there
    saves its state and gives up its workers. ``actor``: the user, as in ``node.cordoned``. ``report``: the report of a
    monitor that the drain follows from (``NodeReported.report``); empty: it follows from none.
    """

    type: Literal["node.draining"] = "node.draining"
    schema_version: Literal[1] = 1
    by: Literal["user", "agent"]
    timeout_s: float
    save: bool = False
    reason: str = ""
    actor: str = ""
    report: str = Field(default="", exclude_if=lambda report: report == "")


class NodeDrained(NodeEvent):
    """No task has a process on the draining node any more."""

    type: Literal["node.drained"] = "node.drained"
    schema_version: Literal[1] = 1


class NodeReturned(NodeEvent):
    """A user wants the node to be used again: one that is cordoned, drained or isolated.

    The detector does so (``actor`` is ``detector``) with a node that it had isolated since a process failed to start
    there, once that failure has followed the task to another node.

    ``incarnation``: that of the agent that has passed its self-test, or of the last agent if the node is lost or has
    left. ``self_test``: the checks that it has passed. ``actor``: as in ``node.cordoned``.
    """

    type: Literal["node.returned"] = "node.returned"
    schema_version: Literal[1] = 1
    incarnation: str
    actor: str = ""
    self_test: list[CheckResult] = Field(default_factory=list)


ReportSeverity = Literal["warning", "error"]
"""What follows from a report: a warning has the node drained, an error has it isolated."""


class NodeReported(NodeEvent):
    """A monitor from outside reports a trouble of the node. A later event with the same ``report`` renews it.

    ``actor``: the monitor, by its credential: ``token/<name>`` or ``uid/<uid>``. ``key``: the monitor's name for this
    trouble of the node. ``reason``: in words. ``evidence``: what the monitor has seen, for people. ``expires_at``: when
    the report counts no longer. ``deadline_at``: when the node goes away whatever happens; None: nobody has said so.
    """

    type: Literal["node.reported"] = "node.reported"
    schema_version: Literal[1] = 1
    actor: str
    key: str
    severity: ReportSeverity
    reason: str
    evidence: dict[str, Any] = Field(default_factory=dict)
    expires_at: datetime
    deadline_at: datetime | None = None

    @property
    def report(self) -> str:
        """What the report is called among those of its node."""
        return f"{self.actor}/{self.key}"


class NodeReportHeld(NodeEvent):
    """Nothing follows from a report for the time being, which only an operator can change at once.

    ``report``: as ``NodeReported`` has it. ``why``: the source has taken as many nodes out of use as it may
    (``budget``), or a task would have fewer workers than it needs (``minimum``). ``reason``: the same in words.
    """

    type: Literal["node.report-held"] = "node.report-held"
    schema_version: Literal[1] = 1
    report: str
    why: Literal["budget", "minimum"]
    reason: str


class NodeMeasured(NodeEvent):
    """A preflight has measured the node, before it joins or is used again, and the detector has judged it.

    ``incarnation``, ``agent_pid``, ``supervisor``, ``domain``, ``workers``, ``hardware``: as ``node.joined`` has them;
    a node that is refused does not join. ``measurement``: what was measured, with the bounds. ``verdict``: of the
    detector. ``reason``: the rates that are slow, or why nothing follows from them.
    """

    type: Literal["node.measured"] = "node.measured"
    schema_version: Literal[1] = 1
    incarnation: str
    agent_pid: int
    supervisor: str = ""
    domain: str
    workers: list[str]
    hardware: str = "cpu"
    measurement: Measurement
    verdict: Verdict
    reason: str = ""


class NodeLeft(NodeEvent):
    """A node left in order: its agent was asked to end. That is no error, and the node counts as no failure.

    ``incarnation``: that of the agent that ended. ``reason``: in words.
    """

    type: Literal["node.left"] = "node.left"
    schema_version: Literal[1] = 1
    incarnation: str
    reason: str
