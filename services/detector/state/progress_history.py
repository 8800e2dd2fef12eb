"""What is known of a task's progress in each of its layouts, over its generations. Pure.

A recovery takes a task through generations: the survivors finish the broken step in a layout of their own, then all go
on in the layout of before. Times in one layout say little about another, whose ranks compute other parts; so each has
its own (``ProgressGaps``), and a generation goes on from what its layout has shown.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.detector.state.progress_gaps import ProgressGaps
from shared.events.plans import Layout, Member

LAYOUTS = 4
"""Layouts of a task that are remembered: that of before a loss of workers, that of after it, and those of the survivors
of the two. One of 1,000 ranks with five phases each takes 7 MB (tracemalloc)."""


class ProgressHistory:
    """The progress of one task.

    Attributes:
        present: that of its present layout.
    """

    __slots__ = ("_by_layout", "present")

    def __init__(self) -> None:
        self.present = ProgressGaps()
        self._by_layout: dict[Layout, ProgressGaps] = {}  # the newest comes last

    def __eq__(self, other: object) -> bool:
        """Compare what was learnt: a layout in which nothing was measured yet is as good as none."""
        return isinstance(other, ProgressHistory) and (self.present, self._learnt()) == (other.present, other._learnt())

    def _learnt(self) -> dict[Layout, ProgressGaps]:
        return {layout: gaps for layout, gaps in self._by_layout.items() if gaps != ProgressGaps()}

    def enter(self, layout: Layout, members: Iterable[Member]) -> None:
        """Begin a generation.

        Args:
            layout: of the generation.
            members: its ranks.
        """
        known = self._by_layout.pop(layout, None)
        self.present = self._by_layout[layout] = known if known is not None else ProgressGaps()
        self.present.begin({member.worker: layout.pipeline_stage(member.rank) for member in members})
        if len(self._by_layout) > LAYOUTS:
            del self._by_layout[next(iter(self._by_layout))]
