"""The demo's post-mortems, written into the run folder while the stack still answers.

The API makes the page of each incident. A slow worker is no incident, since its task trains on; its page is made here,
from the plan that moved its work and from the records of the log.
"""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path
from urllib.parse import quote

from cli.client import Client
from cli.demo_straggler import Straggler
from cli.waiting import Record

SECONDS_PER_HOUR = 3600.0

FOLDER = "postmortem"
"""Folder of the pages, below the run folder."""


def write_pages(server: str, incidents: list[Record], stragglers: list[Straggler], run_dir: Path) -> list[Path]:
    """Write the post-mortem of each incident (HTML) and slow worker (Markdown); return the files, in this order.

    Args:
        server: address of the API, which makes the pages.
        incidents: as the API lists them.
        stragglers: the slow workers that were found.
        run_dir: the demo's folder.
    """
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    files = []
    with Client(server) as client:
        for number, incident in enumerate(incidents, start=1):
            path = f"/v1/incidents/{quote(incident['id'], safe='')}/postmortem"
            file = folder / f"{number}-{incident['kind']}.html"
            file.write_text(client.text(path, {"format": "html"}), encoding="utf-8")
            files.append(file)
        records = client.pages("/v1/events")["items"] if stragglers else []
        costs = client.get("/v1/costs", {"limit": 1}) if stragglers else {}
        for number, straggler in enumerate(stragglers, start=len(files) + 1):
            plan = client.get(f"/v1/plans/{quote(straggler.plan, safe='')}")
            file = folder / f"{number}-slow-worker.md"
            file.write_text(slow_worker_page(straggler, plan, records, costs), encoding="utf-8")
            files.append(file)
    return files


def slow_worker_page(straggler: Straggler, plan: Record, records: list[Record], costs: Record) -> str:
    """Return what became of a slow worker, as Markdown.

    Args:
        straggler: the worker.
        plan: that moved its work.
        records: of the log.
        costs: the cost report, for its price and currency.
    """
    course = []
    for record in records:
        event, words = record["event"], ""
        match record["type"]:
            case "fault.injected" if (event["task"], event["fault"][:4]) == (straggler.task, "slow"):
                words = f"injected as a test by {event['actor'] or 'a user'}: {event['fault']}, rank {event['rank']}"
            case "worker.slowed" if event["worker"] == straggler.worker:
                words = f"{event['worker']} found {event['slowdown']:.2f} times as slow as its peers"
            case "plan.decided" if event["plan"] == straggler.plan:
                words = f"plan {straggler.plan} decided"
            case "state.moved" if event["plan"] == straggler.plan:
                parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in event["durations_s"].items())
                sources = ", ".join(f"{worker} {source}" for worker, source in event["sources"].items())
                words = "; ".join(filter(None, (f"{event['task']}: {event['phase']}", parts, sources)))
        if words:
            course.append(f"| {record['recorded_at'][11:23]} | {words} | {record['position']} |")
    return "\n".join(
        [
            f"# {straggler.worker} of {straggler.task} was {straggler.slowdown:.2f} times as slow as its peers",
            "",
            f"Found {straggler.found_s:.2f} s after the fault was asked for; its work was with others after "
            f"{straggler.moved_s:.2f} s. No incident: the task trained on, and no step was computed again.",
            "",
            "| At (UTC) | What | Log position |",
            "|---|---|---|",
            *course,
            "",
            "What was decided, and why not otherwise:",
            "",
            "```text",
            plan["words"],
            "```",
            "",
            _cost(straggler, records, costs),
            "",
            _before(straggler, records),
            "",
        ]
    )


def _cost(straggler: Straggler, records: list[Record], costs: Record) -> str:
    """Return what a slow worker cost: until it was found all ranks of a step waited for it, then all paused."""
    workers = [
        record["event"]["workers"]
        for record in takewhile(lambda record: not _is_plan(record, straggler), records)
        if record["type"] == "task.progressed" and record["event"]["task"] == straggler.task
    ][-1]
    waited = workers * straggler.found_s * (1.0 - 1.0 / straggler.slowdown)
    paused = workers * (straggler.moved_s - straggler.found_s)
    price = (waited + paused) * costs["price_per_worker_hour"] / SECONDS_PER_HOUR
    return (
        f"What it cost, at most: {waited + paused:.1f} worker-seconds, {price:.4f} {costs['currency']}. A model, since "
        f"no step failed: {workers} workers trained {straggler.slowdown:.2f} times as slowly for "
        f"{straggler.found_s:.2f} s ({waited:.1f}), and paused until the plan was carried out ({paused:.1f}). "
        f"Without a plan, each further hour would have cost "
        f"{workers * SECONDS_PER_HOUR * (1.0 - 1.0 / straggler.slowdown):,.0f} worker-seconds."
    )


def _before(straggler: Straggler, records: list[Record]) -> str:
    """Return which workers of the node were slow before the one that the plan is for."""
    node = straggler.worker.partition("/")[0]
    found = [
        (record["event"]["worker"], record["position"])
        for record in takewhile(lambda record: not _is_plan(record, straggler), records)
        if record["type"] == "worker.slowed" and record["event"]["node"] == node and record["event"]["slowdown"] > 1.0
    ]
    own = max(position for worker, position in found if worker == straggler.worker)
    earlier = ", ".join(f"{worker} at log position {position}" for worker, position in found if position != own)
    return f"Slow workers of {node} before: {earlier or 'none'}."


def _is_plan(record: Record, straggler: Straggler) -> bool:
    """Return whether a record is the plan that moved the worker's work."""
    return bool(record["type"] == "plan.decided" and record["event"]["plan"] == straggler.plan)


def shown(path: Path) -> str:
    """Return a path as it can be typed: relative to the working directory where it lies below it."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
