"""The submission of a command line's task, under a name of its own or that of its earlier attempt."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from cli.launch.checking import say
from cli.launch.specification import numbered
from cli.waiting import Record
from shared.errors import NotFound
from shared.tasks.specification import TaskSpec
from unicron_client.answers import task_path
from unicron_client.resources import ENDED, Client
from unicron_client.specifications import as_body

_RESUMED = frozenset({"stopped", "failed"})
"""States of an earlier task from which a submission of its name goes on."""

_COMMAND: dict[str, object] = {"script": None, "arguments": [], "module": None, "loop": "unicron"}
"""Fields that say which command a task runs, and what they are where a specification has none."""


class Submitted(NamedTuple):
    """A task that was submitted. ``since``: output before that was followed by an earlier run; None: all is new."""

    task: Record
    since: str | None


Whole = Callable[[str], TaskSpec]
"""Returns the specification with which a task restarts whole, for the reason that a step of it cannot be healed.

It raises ``InvalidInput`` where nothing says how many processes the script has.
"""


def submit(client: Client, spec: TaskSpec, *, named: bool, embedded: bool, whole: Whole | None = None) -> Submitted:
    """Submit a task; return it.

    The user's earlier task of its name that was stopped or has failed is gone on with if it ran the same command; else,
    unless the user has given the name, the next free number is put behind it. What an embedded stack was running when
    it was killed goes on by itself: if that is the same command, it is followed. What has restarted whole because a
    setting was refused at its start goes on so.

    Args:
        client: of the server.
        spec: of the task.
        named: whether the user has given the name.
        embedded: whether the server is that of this run.
        whole: for a task that may restart whole.

    Raises:
        UnicronError: the server refuses it.
    """
    body, owner = as_body(spec), client.get("/v1/actor")["name"]
    for number in itertools.count(1):
        body["name"] = numbered(spec.name, number)
        earlier = _task(client, body["name"])
        if earlier is None or earlier["deleted_at"] is not None:
            if earlier is None or named:
                break
            continue
        why = earlier["spec"].get("not_healed", "") if whole is not None else ""
        command = _command(earlier["spec"] | ({"loop": spec.loop} if why else {}))
        same = earlier["owner"] == owner and command == _command(body)
        if same and embedded and earlier["state"] not in ENDED:
            say(f"{body['name']} goes on: its run was ended before it")
            return Submitted(earlier, datetime.now(UTC).isoformat())
        if same and why and whole is not None and earlier["state"] in _RESUMED:
            body = as_body(whole(why)) | {"name": body["name"]}
        if named or (same and earlier["state"] in _RESUMED):
            break
    task = client.submission(body).task
    if task["step"]:
        say(f"{task['name']} goes on from step {task['step']}; under another --name it begins anew")
    else:
        say(f"submitted {task['name']}")
    return Submitted(task, task["submitted_at"] if task["attempt"] > 1 else None)


def _task(client: Client, name: str) -> Record | None:
    try:
        found: Record = client.get(task_path(name))
    except NotFound:
        return None
    return found


def _command(spec: Record) -> list[object]:
    return [spec.get(field, default) for field, default in _COMMAND.items()]
