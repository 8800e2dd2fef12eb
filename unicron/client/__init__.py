"""Python client of the gateway: what ``unicron`` does on the command line, from a program (docs/client.md).

    from unicron.client import Client

    with Client() as client:
        task = client.submit("gpt.yaml")
        task = client.wait(task.name, timeout_s=3600)

Answers are the models of ``services/api/models.py``, and errors those of ``shared/errors.py``. The command line uses
the same client. This package is for programs beside a cluster; nothing else of the library imports it, and it imports
nothing else of the library, so that a training process loads none of it.
"""

from __future__ import annotations

from unicron.client.resources import Client
from unicron.client.waiting import TimedOut

__all__ = ["Client", "TimedOut"]
