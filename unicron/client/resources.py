"""``Client``: tasks, incidents, events and costs of a cluster, typed.

The models are imported when a method first returns one: the verbs of the command line that print JSON as it comes do
not wait for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

from unicron.client.connection import Connection
from unicron.client.transport import PAGE_ITEMS, Params
from unicron.client.waiting import POLL_S, until

if TYPE_CHECKING:
    from pydantic import BaseModel

    from services.api.cost_models import Costs
    from services.api.models import EventRecord, Incident, Stopping, Task
    from unicron.client.specifications import Given

    M = TypeVar("M", bound=BaseModel)

Record = dict[str, Any]
"""A JSON object of the interface."""

ENDED = frozenset({"stopped", "succeeded", "failed"})
"""States of a task that has ended: the values of ``shared.tasks.ENDED``, which takes pydantic to import."""


class Submission(NamedTuple):
    """What has become of a submission. ``new``: false if its idempotency key had submitted the task before."""

    task: Record
    new: bool


class OutputLine(NamedTuple):
    """A line that a rank has printed, without its end. ``worker`` stays when ranks are renumbered."""

    worker: str
    generation: int
    line: str


class MissingOutput(NamedTuple):
    """Output that is left out since its ``node`` does not answer: whose, and why in words."""

    workers: list[str]
    node: str
    problem: str


class Client(Connection):
    """A cluster's tasks, incidents, events and costs. A context manager: the connection is closed at its end.

    Every method raises an error of ``shared.errors``: ``Unavailable`` if the server cannot be reached, ``Forbidden`` if
    the token does not allow what is asked, and what the method says. Client and server are of one version: an answer
    that this version does not know is ``Undecodable``.
    """

    def submit(self, spec: Given, *, key: str | None = None) -> Task:
        """Submit a task; return it.

        Args:
            spec: the specification, its fields, or the path of its file (YAML). Relative paths in it are taken from the
                file's folder, or else from the working directory.
            key: idempotency key: a further submission with it returns the task of the first one.

        Raises:
            InvalidInput: a field is wrong, or a node cannot use a file.
            Conflict: the name is in use, or the key was used for something else.
        """
        from services.api.models import Task
        from unicron.client.specifications import as_body, specification

        return typed(Task, self.submission(as_body(specification(spec)), key).task)

    def submission(self, body: Record, key: str | None = None) -> Submission:
        """Submit a task, given as JSON; return it as JSON, and whether this call has submitted it."""
        headers = {} if key is None else {"Idempotency-Key": key}
        answer = self.answer("POST", "/v1/tasks", body, headers=headers)
        return Submission(answer.content, new=answer.status == 201)

    def task(self, name: str) -> Task:
        """Return a task.

        Raises:
            NotFound: there is none of this name.
        """
        from services.api.models import Task

        return typed(Task, self.get(task_path(name)))

    def tasks(self, states: Collection[str] = (), *, newest_first: bool = False) -> Iterator[Task]:
        """Yield tasks in the order of their submission; the next page is asked for when it is needed.

        Args:
            states: only tasks in one of these; empty: in any.
            newest_first: in the reverse order.
        """
        from services.api.models import Task

        return (
            typed(Task, item) for item in self.items("/v1/tasks", {"state": sorted(states), **_order(newest_first)})
        )

    def wait(
        self, name: str, states: Collection[str] = ENDED, *, timeout_s: float | None = None, poll_s: float = POLL_S
    ) -> Task:
        """Return a task once it is in one of these states; without ``states`` once it has ended, however it did.

        Args:
            name: of the task.
            states: to wait for.
            timeout_s: longest wait in seconds; None: without end.
            poll_s: seconds between two looks.

        Raises:
            NotFound: there is no such task.
            Conflict: it has ended in another state.
            TimedOut: the limit has passed.
        """
        from services.api.models import Task
        from shared.errors import Conflict

        found = self.wait_for(name, {*states, *ENDED}, timeout_s, poll_s=poll_s)
        if found["state"] not in states:
            raise Conflict(
                f"task {name!r} has ended: {found['state']}, {found['reason'] or 'no reason is known'}",
                state=found["state"],
            )
        return typed(Task, found)

    def wait_for(
        self,
        name: str,
        states: Collection[str],
        timeout_s: float | None = None,
        *,
        poll_s: float = POLL_S,
        seen: Callable[[Record], None] | None = None,
    ) -> Record:
        """Return a task as JSON once it is in one of these states.

        Args:
            name: of the task.
            states: any of them.
            timeout_s: longest wait in seconds; None: without end.
            poll_s: seconds between two looks.
            seen: called with the task at each look.

        Raises:
            TimedOut: the limit has passed.
        """

        def reached() -> Record | None:
            task: Record = self.get(task_path(name))
            if seen is not None:
                seen(task)
            return task if task["state"] in states else None

        return until(f"{name} is {' or '.join(sorted(states))}", reached, timeout_s, poll_s=poll_s)

    def logs(self, name: str, *, rank: int | None = None, follow: bool = False) -> Iterator[OutputLine | MissingOutput]:
        """Yield what a task's ranks have printed, and what is left out since a node does not answer.

        Args:
            name: of the task.
            rank: only the worker of this rank.
            follow: wait for more until the task ends.

        Raises:
            NotFound: there is no such task, or no such rank.
        """
        params = {"rank": rank, "follow": follow}
        with self.lines(f"{task_path(name)}/logs", params, accept="application/x-ndjson") as lines:
            for entry in map(json.loads, lines):
                yield MissingOutput(**entry) if "problem" in entry else OutputLine(**entry)

    def stop(self, name: str, *, lose_steps: bool = False) -> Stopping:
        """Have a task stop at its next step, with a checkpoint; ``wait`` says when it has.

        Args:
            name: of the task.
            lose_steps: stop it also if its state cannot be saved.

        Raises:
            NotFound: there is no such task.
            Conflict: it has ended.
        """
        from services.api.models import Stopping

        return typed(Stopping, self.post(f"{task_path(name)}/stop", {"lose_steps": lose_steps}))

    def incidents(self, *, task: str | None = None, newest_first: bool = False) -> Iterator[Incident]:
        """Yield incidents in the order in which they were detected.

        Args:
            task: only those that hit this task, or whose plans changed it.
            newest_first: in the reverse order.
        """
        from services.api.models import Incident

        found = self.items("/v1/incidents", {"task": task, **_order(newest_first)})
        return (typed(Incident, item) for item in found)

    def incident(self, incident: str) -> Incident:
        """Return an incident by its id.

        Raises:
            NotFound: there is none.
        """
        from services.api.models import Incident

        return typed(Incident, self.get(f"/v1/incidents/{quote(incident, safe='')}"))

    def events(self, *, after: int = 0, follow: bool = False) -> Iterator[EventRecord]:
        """Yield events in log order.

        Args:
            after: only those behind this position of the log.
            follow: wait for further events, until the server ends or the caller stops asking.
        """
        from services.api.models import EventRecord

        if not follow:
            yield from (typed(EventRecord, item) for item in self.items("/v1/events", {"after": after}))
            return
        with self.lines("/v1/events", {"after": after, "follow": True}, accept="text/event-stream") as lines:
            yield from (typed(EventRecord, item) for item in server_sent(lines))

    def cost(self) -> Costs:
        """Return where the worker-seconds of the whole log went, and what failures cost."""
        from services.api.cost_models import Costs

        return typed(Costs, self.get("/v1/costs"))

    def items(self, path: str, params: Params | None = None) -> Iterator[Record]:
        """Yield the items of a list as JSON, from page to page."""
        cursor: str | None = None
        while True:
            page = self.get(path, {**(params or {}), "limit": PAGE_ITEMS, "cursor": cursor})
            yield from page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return


def task_path(name: str) -> str:
    """Return where a task is."""
    return f"/v1/tasks/{quote(name, safe='')}"


def server_sent(lines: Iterable[str]) -> Iterator[Record]:
    """Yield the records in a stream of server-sent events (each has one ``data`` line)."""
    for text in lines:
        if text.startswith("data:"):
            yield json.loads(text.removeprefix("data:"))


def typed(kind: type[M], value: object) -> M:
    """Return an answer as its model.

    Raises:
        Undecodable: it is none, as of a server of another version.
    """
    from pydantic import ValidationError

    from shared.errors import Undecodable

    try:
        return kind.model_validate(value)
    except ValidationError as err:
        places = ", ".join(".".join(map(str, item["loc"])) for item in err.errors(include_url=False)[:3])
        raise Undecodable(
            f"the server's answer is no {kind.__name__} that this version knows ({places}); "
            "client and server have to be of one version"
        ) from err


def _order(newest_first: bool) -> Params:
    return {"order": "newest"} if newest_first else {}
