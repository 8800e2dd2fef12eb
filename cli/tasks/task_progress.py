"""The progress bar of a task that a verb waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cli.progress import step_bar
from cli.tasks.remaining_time import eta


@contextmanager
def task_bar(name: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show a task's steps, and how long it still trains; yields what is called with the task as it is now."""
    with step_bar(name) as shown:
        yield lambda task: shown(words(task), task["step"], task["steps"])


def words(task: dict[str, Any]) -> str:
    """Return a task's state, steps and remaining time in a few words."""
    left = eta(task)
    return f"{task['name']}: {task['state']}, step {task['step']}/{task['steps']}{f', {left} left' if left else ''}"
