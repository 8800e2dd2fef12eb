"""Python client of the gateway: what ``unicron`` does on the command line, from a program (docs/client.md).

    from unicron_client import Client

    with Client() as client:
        task = client.submit("gpt.yaml")
        task = client.wait(task.name, timeout_s=3600)

Answers are the models of ``shared/interface/models.py``, and errors those of ``shared/errors.py``. The command
line uses the same client. This package is for programs beside a cluster; it uses nothing of the library inside a
training process.
"""

from __future__ import annotations

from shared.errors import TimedOut
from unicron_client.resources import Client

__all__ = ["Client", "TimedOut"]
