"""Progress of what a verb waits for: bars on a terminal's standard error, and how long a task still trains."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from unicron_client.answers import step_of

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")

AFTER_S = 1.0
"""A bar appears after this time: what is done before then needs none, and would flicker."""

_EVERY = 100
"""Items between two updates of a count: an update takes a microsecond or two, as long as some items."""

_TRAINS = frozenset({"running", "degraded"})
"""States in which a task does steps. In the others its last step time says nothing of when it goes on."""

_UNITS_S = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[float], None]]:
    """Show a bar with the time that is left; yields what is called with the share that is done, from 0 to 1.

    Until it is called for the first time, the bar only shows that work goes on.
    """
    with _shown(what, share=True) as bar:
        yield lambda share: bar.update(completed=share, total=1.0)


@contextmanager
def step_bar(what: str) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a bar of steps; yields what is called with words, the steps done, and all steps where that is known."""
    with _shown(what) as bar:
        yield lambda words, done, total: bar.update(description=words, completed=done, total=total)


@contextmanager
def number_bar(what: str) -> Iterator[Callable[[int], None]]:
    """Show a number that grows; yields what is called with it."""
    with _shown(what) as bar:
        yield lambda number: bar.update(description=f"{number} {what}")


@contextmanager
def counted(what: str, total: int | None = None) -> Iterator[Callable[[Iterable[T]], Iterator[T]]]:
    """Show how many items have passed, of how many if that is known; yields what wraps them."""
    with _shown(what, share=total is not None) as bar:

        def count(items: Iterable[T]) -> Iterator[T]:
            for number, item in enumerate(items, 1):
                if number % _EVERY == 0:
                    bar.update(completed=number, total=total, description=f"{what}, {number}")
                yield item

        yield count


class _Bar:
    """One line of a display; without one, where standard error is no terminal, nothing."""

    def __init__(self, progress: Progress | None, what: str) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task(what, total=None)

    def update(self, **changes: Any) -> None:
        """Change the line."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, **changes)


@contextmanager
def _shown(what: str, *, share: bool = False) -> Iterator[_Bar]:
    """Give a line that appears after ``AFTER_S``, and goes at the end. ``share``: with the share and the time left."""
    if not sys.stderr.isatty():
        yield _Bar(None, what)
        return
    from rich import progress as bars
    from rich.console import Console

    left = (bars.TaskProgressColumn(), bars.TimeRemainingColumn()) if share else ()
    parts = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TimeElapsedColumn(), *left)
    progress = bars.Progress(*parts, console=Console(stderr=True), transient=True)
    appears = threading.Timer(AFTER_S, progress.start)
    appears.daemon = True
    appears.start()
    try:
        yield _Bar(progress, what)
    finally:
        appears.cancel()
        appears.join()  # or it could appear behind the end
        progress.stop()


def remaining_s(task: dict[str, Any]) -> float | None:
    """Return the seconds that a task still trains if its steps take as long as of late; None while nobody can say."""
    if task["state"] not in _TRAINS or not task["step_s"] or task["steps"] is None:
        return None
    return float((task["steps"] - task["step"]) * task["step_s"])


def eta(task: dict[str, Any]) -> str | None:
    """Return the remaining time of a task as text; None while nobody can say."""
    seconds = remaining_s(task)
    return None if seconds is None else duration(seconds)


def duration(seconds: float) -> str:
    """Return a time in its two largest units, such as ``3d04h``; below a minute in seconds."""
    whole = max(round(seconds), 0)
    for (unit, unit_s), (smaller, smaller_s) in pairwise(_UNITS_S):
        if whole >= unit_s:
            return f"{whole // unit_s}{unit}{whole % unit_s // smaller_s:02d}{smaller}"
    return f"{whole}s"


@contextmanager
def task_bar(name: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show a task's steps, and how long it still trains; yields what is called with the task as it is now."""
    with step_bar(name) as shown:
        yield lambda task: shown(words(task), task["step"], task["steps"])


def words(task: dict[str, Any]) -> str:
    """Return a task's state, steps and remaining time in a few words."""
    left = eta(task)
    return f"{task['name']}: {task['state']}, step {step_of(task, '/')}{f', {left} left' if left else ''}"
