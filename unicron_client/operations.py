"""The part of ``Client`` for those who operate a cluster: nodes, plans, incidents."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from unicron_client.answers import incident_path, moment, node_path, order, plan_path, typed
from unicron_client.connection import Connection

if TYPE_CHECKING:
    from shared.interface.models import Incident, Node, PlanDetail, PlanSummary

SELF_TEST_S = 230.0
"""Time for a node's self-test, which takes seconds, and with a preflight a minute: twice the longest that the api waits
for one agent (``shared.messages.self_test``), and its own."""


class Operations(Connection):
    """Nodes, plans and incidents of a cluster."""

    def nodes(self, states: Collection[str] = ()) -> Iterator[Node]:
        """Yield nodes in the order in which they first joined.

        Args:
            states: only nodes in one of these; empty: in any.
        """
        from shared.interface.models import Node

        return (typed(Node, item) for item in self.items("/v1/nodes", {"state": sorted(states)}))

    def node(self, name: str) -> Node:
        """Return a node.

        Raises:
            NotFound: there is none of this name.
        """
        from shared.interface.models import Node

        return typed(Node, self.get(node_path(name)))

    def cordon(self, name: str, *, reason: str = "") -> Node:
        """Place no new work on a node; what runs there stays.

        Args:
            name: of the node.
            reason: for other people.

        Raises:
            NotFound: there is no such node.
        """
        from shared.interface.models import Node

        return typed(Node, self.post(f"{node_path(name)}/cordon", {"reason": reason}))

    def drain(self, name: str, *, reason: str = "", timeout_s: float | None = None) -> Node:
        """Have a node's tasks move away, or save and wait; its state says when it is empty (``drained``).

        Args:
            name: of the node.
            reason: for other people.
            timeout_s: how long tasks may take to move; None: the server's setting.

        Raises:
            NotFound: there is no such node.
            Conflict: it has no agent.
        """
        from shared.interface.models import Node

        return typed(Node, self.post(f"{node_path(name)}/drain", {"reason": reason, "timeout_s": timeout_s}))

    def return_node(self, name: str) -> Node:
        """Use a cordoned, drained or isolated node again; its agent tests itself first.

        Raises:
            NotFound: there is no such node.
            Conflict: it has no agent, or has failed the test.
        """
        from shared.interface.models import Node

        return typed(Node, self.post(f"{node_path(name)}/return", read_timeout_s=SELF_TEST_S))

    def plans(
        self,
        *,
        task: str | None = None,
        states: Collection[str] = (),
        since: datetime | None = None,
        until: datetime | None = None,
        newest_first: bool = False,
    ) -> Iterator[PlanSummary]:
        """Yield plans in the order in which they were decided.

        Args:
            task: only those that concern this task.
            states: only plans in one of these; empty: in any.
            since: only those decided from then on.
            until: only those decided before then.
            newest_first: in the reverse order.
        """
        from shared.interface.models import PlanSummary

        wanted = {"task": task, "state": sorted(states), "since": moment(since), "until": moment(until)}
        return (typed(PlanSummary, item) for item in self.items("/v1/plans", {**wanted, **order(newest_first)}))

    def plan(self, plan: str) -> PlanDetail:
        """Return a plan by its id, with its words, its milestones and its event.

        Raises:
            NotFound: there is none.
        """
        from shared.interface.models import PlanDetail

        return typed(PlanDetail, self.get(plan_path(plan)))

    def incidents(
        self,
        *,
        task: str | None = None,
        state: Literal["open", "closed"] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        newest_first: bool = False,
    ) -> Iterator[Incident]:
        """Yield incidents in the order in which they were detected.

        Args:
            task: only those that hit this task, or whose plans changed it.
            state: only these; closed: all is back at planned strength.
            since: only those detected from then on.
            until: only those detected before then.
            newest_first: in the reverse order.
        """
        from shared.interface.models import Incident

        wanted = {"task": task, "state": state, "since": moment(since), "until": moment(until)}
        found = self.items("/v1/incidents", {**wanted, **order(newest_first)})
        return (typed(Incident, item) for item in found)

    def incident(self, incident: str) -> Incident:
        """Return an incident by its id.

        Raises:
            NotFound: there is none.
        """
        from shared.interface.models import Incident

        return typed(Incident, self.get(incident_path(incident)))

    def acknowledge(self, incident: str) -> Incident:
        """Say that somebody takes care of an incident; once somebody does, nothing changes.

        Raises:
            NotFound: there is no such incident.
        """
        from shared.interface.models import Incident

        return typed(Incident, self.post(f"{incident_path(incident)}/acknowledge"))

    def note(self, incident: str, text: str) -> Incident:
        """Add a note to an incident, for everybody who looks at it.

        Raises:
            NotFound: there is no such incident.
            Conflict: it has as many notes as are kept.
        """
        from shared.interface.models import Incident

        return typed(Incident, self.post(f"{incident_path(incident)}/notes", {"text": text}))

    def postmortem(self, incident: str, output: Literal["md", "html", "json"] = "md") -> str:
        """Return the post-mortem of an incident as text.

        Args:
            incident: its id.
            output: Markdown, HTML in one file that needs no other, or JSON.

        Raises:
            NotFound: there is no such incident.
        """
        return self.text(f"{incident_path(incident)}/postmortem", {"format": output})
