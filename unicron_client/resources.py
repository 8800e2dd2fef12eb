"""``Client``: tasks, events and costs of a cluster, typed; ``Operations`` has nodes, plans and incidents."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from shared.errors import AnswerLost, NotFound, UnicronError
from unicron_client.answers import Record, moment, order, server_sent, step_of, task_path, typed
from unicron_client.operations import Operations
from unicron_client.output import MissingOutput, OutputLine, output
from unicron_client.transport import Params
from unicron_client.waiting import POLL_S, until

if TYPE_CHECKING:
    from shared.interface.costs import Costs
    from shared.interface.models import Attempt, EventRecord, Stopping, Task, TaskMetrics
    from unicron_client.shipped_code import Shipment
    from unicron_client.specifications import Given

UNLIMITED = "any"
"""Value of ``max_workers`` that lifts the limit."""

ENDED = frozenset({"stopped", "succeeded", "failed"})
"""States of a task that has ended: the values of ``specification.ENDED``, which takes pydantic to import."""


class Submission(NamedTuple):
    """What has become of a submission. ``new``: false if its idempotency key had submitted the task before."""

    task: Record
    new: bool


class Client(Operations):
    """A cluster's tasks, nodes, plans, incidents, events and costs.

    A context manager: the connection is closed at its end.

    Every method raises an error of ``shared.errors``: ``Unavailable`` if the server cannot be reached, ``Forbidden`` if
    the token does not allow what is asked, and what the method says. Client and server are of one version: an answer
    that this version does not know is ``Undecodable``.
    """

    def submit(
        self,
        spec: Given,
        *,
        key: str | None = None,
        ship: str | os.PathLike[str] | None = None,
        ship_files: Collection[str] = (),
    ) -> Task:
        """Submit a task; return it.

        Args:
            spec: the specification, its fields, or the path of its file (YAML). Relative paths in it are taken from the
                file's folder, or else from the working directory.
            key: idempotency key: a further submission with it returns the task of the first one.
            ship: the folder whose files come along, without those that are ignored (``.gitignore``); None: the nodes
                have the script.
            ship_files: files in it that look like secrets, and come along all the same.

        Raises:
            InvalidInput: a field is wrong, a node cannot use a file, or a file may not come along.
            Conflict: the name is in use, or the key was used for something else.
            AnswerLost: it may be recorded; the error says what the server has.
        """
        from shared.interface.models import Task
        from unicron_client.specifications import as_body, specification

        found = specification(spec)
        if ship is not None:
            from unicron_client.shipped_code import shipment

            shipped = shipment(Path(ship), ship_files)
            found = shipped.of(found)
            self.send_code(shipped)
        return typed(Task, self.submission(as_body(found), key).task)

    def send_code(self, shipped: Shipment) -> None:
        """Send the code of a task that is submitted next.

        Raises:
            Conflict: this user has sent as much as is kept.
        """
        self.send(f"/v1/code/{shipped.code.digest}", shipped.archive, "application/x-tar")

    def submission(self, body: Record, key: str | None = None) -> Submission:
        """Submit a task, given as JSON; return it as JSON, and whether this call has submitted it."""
        headers = {} if key is None else {"Idempotency-Key": key}
        try:
            answer = self.answer("POST", "/v1/tasks", body, headers=headers)
        except AnswerLost as err:
            raise AnswerLost(f"{err.detail}: {self._recorded(str(body.get('name', '')))}") from err
        return Submission(answer.content, new=answer.status == 201)

    def _recorded(self, name: str) -> str:
        """Say what the server has of a task whose submission got no answer."""
        try:
            task = self.get(task_path(name))
        except NotFound:
            return f"the server has no task {name}"
        except UnicronError:
            return f"whether there is a task {name} cannot be asked now"
        return f"the server has a task {name}, {task['state']}, submitted at {task['submitted_at']}"

    def task(self, name: str) -> Task:
        """Return a task.

        Raises:
            NotFound: there is none of this name.
        """
        from shared.interface.models import Task

        return typed(Task, self.get(task_path(name)))

    def tasks(self, states: Collection[str] = (), *, newest_first: bool = False) -> Iterator[Task]:
        """Yield tasks in the order of their submission; the next page is asked for when it is needed.

        Args:
            states: only tasks in one of these; empty: in any.
            newest_first: in the reverse order.
        """
        from shared.interface.models import Task

        return (typed(Task, item) for item in self.items("/v1/tasks", {"state": sorted(states), **order(newest_first)}))

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
        from shared.errors import Conflict
        from shared.interface.models import Task

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
        last: Record = {}

        def reached() -> Record | None:
            task: Record = self.get(task_path(name))
            last.update(task)
            if seen is not None:
                seen(task)
            return task if task["state"] in states else None

        def instead() -> str:
            reason = f" ({last['reason']})" if last["reason"] else ""
            return f"it is {last['state']} at step {step_of(last)}{reason}"

        return until(_wanted(name, states), reached, timeout_s, poll_s=poll_s, instead=instead)

    def attempts(self, name: str) -> Iterator[Attempt]:
        """Yield the submissions of a task's name in their order, and what became of each; the present one is the last.

        Raises:
            NotFound: there is no such task.
        """
        from shared.interface.models import Attempt

        return (typed(Attempt, item) for item in self.items(f"{task_path(name)}/attempts"))

    def metrics(self, name: str, *metrics: str, attempt: int | None = None, points: int | None = None) -> TaskMetrics:
        """Return what the script of a task has logged: all names, and the values of the metrics that are asked for.

        Args:
            name: of the task.
            metrics: their names.
            attempt: number of the submission; None: the present one.
            points: most values of each; None: as many as the server returns by itself.

        Raises:
            NotFound: there is no such task, or no such submission.
        """
        from shared.interface.models import TaskMetrics

        asked: Params = {"metric": [*metrics], "attempt": attempt, "points": points}
        return typed(TaskMetrics, self.get(f"{task_path(name)}/metrics", asked))

    def logs(
        self,
        name: str,
        *,
        rank: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        since: datetime | None = None,
        grep: str | re.Pattern[str] | None = None,
    ) -> Iterator[OutputLine | MissingOutput]:
        """Yield what a task's ranks have printed, and what is left out since a node does not answer.

        Args:
            name: of the task.
            rank: only the worker of this rank.
            follow: wait for more until the task ends.
            tail: of what there is already, only the last so many lines of each worker.
            since: only what was printed from then on; what is up to 6 s older may come, too.
            grep: only lines in which this expression is. ``tail`` counts these; with ``follow`` all lines.

        Raises:
            NotFound: there is no such task, or no such rank.
        """
        wanted = re.compile(grep) if grep is not None else None
        found = output(self, name, rank=rank, follow=follow, tail=tail, since=moment(since), wanted=wanted)
        for entry in found:
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
        from shared.interface.models import Stopping

        return typed(Stopping, self.post(f"{task_path(name)}/stop", {"lose_steps": lose_steps}))

    def kill(self, name: str) -> Stopping:
        """Have a task's processes end at once, without a checkpoint; ``wait`` says when they have.

        Raises:
            NotFound: there is no such task.
            Conflict: it has succeeded or failed.
        """
        from shared.interface.models import Stopping

        return typed(Stopping, self.post(f"{task_path(name)}/stop", {"lose_steps": True, "at_once": True}))

    def resume(self, name: str) -> Task:
        """Submit the last specification of a task that was stopped or has failed again: it goes on from its checkpoint.

        A task that has not ended and waits after failures is tried again at once.

        Raises:
            NotFound: there is no such task.
            Conflict: it has not ended and does not wait, or has done all its steps.
        """
        from shared.interface.models import Task

        return typed(Task, self.post(f"{task_path(name)}/resume"))

    def change(
        self,
        name: str,
        *,
        weight: float | None = None,
        min_workers: int | None = None,
        max_workers: int | Literal["any"] | None = None,
    ) -> Task:
        """Give a task that goes on another weight, or other limits of its workers; what is None stays.

        Args:
            name: of the task.
            weight: its priority among all tasks.
            min_workers: fewest with which it runs.
            max_workers: most that it may have; ``"any"`` lifts the limit.

        Raises:
            NotFound: there is no such task.
            Conflict: it has ended.
            InvalidInput: a value is not allowed.
        """
        from shared.interface.models import Task

        limits: Record = {} if min_workers is None else {"min": min_workers}
        if max_workers is not None:
            limits["max"] = None if max_workers == UNLIMITED else max_workers
        patch: Record = {} if weight is None else {"weight": weight}
        return typed(Task, self.request("PATCH", task_path(name), patch | ({"workers": limits} if limits else {})))

    def delete_task(self, name: str) -> Task:
        """List a task that has ended no more; one that is deleted stays so. Its events and checkpoints stay.

        Raises:
            NotFound: there is no such task.
            Conflict: it has not ended.
        """
        from shared.interface.models import Task

        return typed(Task, self.request("DELETE", task_path(name)))

    def events(
        self,
        *,
        after: int = 0,
        last: int | None = None,
        types: Collection[str] = (),
        since: datetime | None = None,
        follow: bool = False,
    ) -> Iterator[EventRecord]:
        """Yield events in log order.

        Args:
            after: only those behind this position of the log.
            last: only the last so many; with ``follow`` also what comes.
            types: only events of these, such as ``plan.decided``; empty: of all.
            since: only those recorded from then on.
            follow: wait for further events, until the server ends or the caller stops asking.

        Raises:
            InvalidInput: there are no events of such a type.
        """
        from shared.interface.models import EventRecord

        wanted: Params = {"after": after, "last": last, "type": sorted(types), "since": moment(since)}
        if not follow:
            yield from (typed(EventRecord, item) for item in self.items("/v1/events", wanted))
            return
        with self.lines("/v1/events", {**wanted, "follow": True}, accept="text/event-stream") as lines:
            yield from (typed(EventRecord, item) for item in server_sent(lines))

    def cost(self) -> Costs:
        """Return where the worker-seconds of the whole log went, and what failures cost."""
        from shared.interface.costs import Costs

        return typed(Costs, self.get("/v1/costs"))


def _wanted(name: str, states: Collection[str]) -> str:
    """Return what is waited for, in words that say of no state that the task is in it."""
    how = ["to end"] if ENDED <= set(states) else []
    others = sorted(set(states) - ENDED if how else states)
    if others:
        how.insert(0, f"to be {' or '.join(others)}")
    return f"{name} {' or '.join(how)}"
