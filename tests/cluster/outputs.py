"""The output of a task's ranks on all machines, as the API shows it."""

from __future__ import annotations

import json

from tests.e2e.kit import Client, Record

ANSWER_S = 60.0
"""Generous: an answer takes up to 2 s where a node is silent, and an interpreter starts in a second."""


def output(client: Client, task: str) -> list[Record]:
    """Return the output of a task, and what is missing of it."""
    headers = {"Accept": "application/x-ndjson"}
    response = client.http.get(f"/v1/tasks/{task}/logs", headers=headers, timeout=ANSWER_S)
    return [json.loads(line) for line in response.raise_for_status().text.splitlines()]


def printed(client: Client, task: str) -> set[tuple[str, int]]:
    """Return worker and generation of each process of which there is output, once all nodes have answered."""

    def complete() -> list[Record]:
        entries = output(client, task)
        return entries if all("problem" not in entry for entry in entries) else []

    entries = client.until(f"the output of {task} is complete", complete, ANSWER_S)
    return {(entry["worker"], entry["generation"]) for entry in entries}


def missing(client: Client, task: str, problem: str) -> list[Record]:
    """Return the output of a task once nothing but ``problem`` keeps it from being complete."""

    def partial() -> list[Record]:
        entries = output(client, task)
        return entries if [e["problem"] for e in entries if "problem" in e] == [problem] else []

    found: list[Record] = client.until(problem, partial, ANSWER_S)
    return found
