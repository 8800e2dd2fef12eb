"""The end of a run: what has become of the task, and what the faults on its way have cost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from cli.output import SHORT_ID
from cli.waiting import Record
from unicron_client.answers import restarts_whole, step_of
from unicron_client.resources import ENDED, Client
from unicron_client.transport import Params

FOLDER = "postmortem"
"""Folder of the pages, below the run directory."""

MOST_PAGES = 20
"""Pages that are written: those of the newest faults. More than a screen of them are looked for in the log."""


class Ending(NamedTuple):
    """A task as it is at the end of a run.

    ``incidents``: faults that hit it while it ran, the newest first. ``postmortems``: the pages about them, or the
    commands that print them, the newest first.
    """

    task: Record
    incidents: list[Record]
    postmortems: list[str]

    @property
    def succeeded(self) -> bool:
        """Whether the task has come to its end."""
        return bool(self.task["state"] == "succeeded")

    @property
    def healed(self) -> int:
        """Faults after which the task has trained on."""
        return sum(incident["resumed_at"] is not None for incident in self.incidents)

    @property
    def lost_s(self) -> float:
        """Seconds between each of these faults and the end of the step that it interrupted."""
        return sum(
            (_time(incident["resumed_at"]) - _time(incident["occurred_at"])).total_seconds()
            for incident in self.incidents
            if incident["resumed_at"] is not None
        )

    def document(self) -> Record:
        """Return it as JSON has it."""
        return {
            "task": self.task,
            "faults_healed": self.healed,
            "lost_s": round(self.lost_s, 3),
            "postmortems": self.postmortems,
        }

    def line(self) -> str:
        """Return it as a line."""
        task = self.task
        how = task["state"] if task["state"] in ENDED else f"goes on ({task['state']})"
        known = task["steps"] is not None or task["step"]  # a script that restarts whole need not say
        parts = [f"{task['name']} {how}{f' at step {step_of(task)}' if known else ''}"]
        if self.healed:
            what = "until the script ran again" if restarts_whole(task["spec"]) else "lost"
            parts.append(f"{self.healed} fault{'s' * (self.healed > 1)} healed, {self.lost_s:.1f} s {what}")
        if not self.succeeded and task["reason"]:
            parts.append(str(task["reason"]))
        if task["state"] == "stopped" and task["checkpoint"]:
            parts.append(f"saved in {task['checkpoint']}")
        if self.postmortems:
            parts.append(self.postmortems[0])
        return "; ".join(parts)


def ending_of(client: Client, name: str, run_dir: Path | None) -> Ending:
    """Return how a task is, with the faults of its present attempt.

    Args:
        client: of the server.
        name: of the task.
        run_dir: where the pages about faults are written, since the server ends; None: it stays.
    """
    task: Record = client.get(f"/v1/tasks/{quote(name, safe='')}")
    newest: Params = {"task": name, "order": "newest", "limit": 1000}
    since = _time(task["submitted_at"])
    incidents = [
        incident for incident in client.get("/v1/incidents", newest)["items"] if _time(incident["occurred_at"]) >= since
    ]
    if run_dir is None:
        pages = [f"`unicron postmortem {incident['id'][:SHORT_ID]}`" for incident in incidents]
    else:
        pages = _write_pages(client, name, incidents[:MOST_PAGES], run_dir / FOLDER)
    return Ending(task, incidents, pages)


def lines_of_fault(incident: Record, said: int) -> list[str]:
    """Return the lines about a fault while the task runs: what it is, and how it was healed.

    Args:
        incident: the fault as it is now.
        said: how many of its lines were returned before; they are left out.
    """
    where = incident["worker"] or incident["node"] or incident["task"]
    rank = "" if incident["rank"] is None else f" (rank {incident['rank']})"
    step = "" if incident["step"] is None else f" in step {incident['step'] + 1}"
    lines = [f"{incident['kind']} of {where}{rank}{step}; `unicron incidents show {incident['id'][:SHORT_ID]}`"]
    if incident["resumed_at"] is not None:
        healed_s = (_time(incident["resumed_at"]) - _time(incident["occurred_at"])).total_seconds()
        again = incident["steps_recomputed"]
        lost = f"{again} step{'s' * (again > 1)} computed again" if again else "no step lost"
        lines.append(f"{incident['kind']} of {where}: healed after {healed_s:.1f} s, {lost}")
    return lines[said:]


def _write_pages(client: Client, name: str, incidents: Sequence[Record], folder: Path) -> list[str]:
    """Write the post-mortem of each incident as a page; return the files as they can be typed."""
    if incidents:
        folder.mkdir(exist_ok=True)
    files = []
    for incident in incidents:
        file = folder / f"{name}-{incident['id'][:SHORT_ID]}.html"
        page = client.text(f"/v1/incidents/{quote(incident['id'], safe='')}/postmortem", {"format": "html"})
        file.write_text(page, encoding="utf-8")
        files.append(os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file))
    return files


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
