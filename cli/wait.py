"""Waiting for a task to end."""

from __future__ import annotations

import time
from typing import Any

from cli.client import Client
from shared.tasks import ENDED

_POLL_S = 0.5
"""How often the task is asked for: training takes minutes to weeks."""


def wait_for_end(client: Client, name: str) -> dict[str, Any]:
    """Return the task once it has ended, whatever the end."""
    while True:
        task: dict[str, Any] = client.get(f"/v1/tasks/{name}")
        if task["state"] in ENDED:
            return task
        time.sleep(_POLL_S)
