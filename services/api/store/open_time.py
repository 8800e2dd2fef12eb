"""The open time: what is not settled yet, which requests settle once for each state of the projections.

Behind the latest time that the log says anything of, each second of each worker goes to the same claim as the second
before, until the log has a further event. So amounts grow evenly from then on: it takes one settlement, up to a second
behind that time, to know the amounts up to any later present.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from shared.costs.claim_times import last_bound_s
from shared.costs.ledger import History, Ledger, ledger
from shared.costs.settlement import COLUMNS, Amounts, Sums, incident_sums, sums_of
from shared.costs.span_claims import Window
from shared.views.documents import TaskView

_GRID = 64.0
"""Of a second. The time from which amounts grow is a multiple of a 64th of a second, which a float64 and a ``datetime``
have exactly: a second behind it is then a second, and what is extrapolated over months is not off by rounding."""


@dataclass(frozen=True)
class OpenTime:
    """The open time in one state of the projections.

    ``until_s``: up to when ``sums`` are. ``each_s``: what every later second adds.
    """

    until_s: float
    sums: Sums
    each_s: Sums

    @classmethod
    def of(cls, history: History, tasks: Mapping[str, TaskView], settled_s: float) -> OpenTime:
        """Settle the time from ``settled_s`` on, seconds since the epoch; the others are as for ``settle_window``."""
        until_s = _grows_from_s(history, tasks, settled_s)
        return cls._of(history, settled_s, until_s, lambda book, part: sums_of(book, history, tasks, part))

    @classmethod
    def of_incidents(cls, history: History, tasks: Mapping[str, TaskView], settled_s: float) -> OpenTime:
        """Settle what incidents have of the time, as ``of`` does: lists of incidents need no more, and ask often."""
        until_s = _grows_from_s(history, tasks, settled_s)
        return cls._of(history, settled_s, until_s, lambda book, _: incident_sums(book), unused=False)

    @classmethod
    def _of(
        cls,
        history: History,
        settled_s: float,
        until_s: float,
        add_up: Callable[[Ledger, Window], Sums],
        *,
        unused: bool = True,
    ) -> OpenTime:
        passed, behind = Window(settled_s, until_s), Window(until_s, until_s + 1.0)
        whole = Window(settled_s, behind.end_s)
        book = ledger(history, datetime.fromtimestamp(behind.end_s, UTC), whole, unused=unused)
        sums, each_s = (add_up(book.within(part), part) for part in (passed, behind))
        return cls(until_s, sums, each_s)

    def up_to(self, end_s: float, dimension: str, keys: Iterable[str] | None = None) -> dict[str, Amounts]:
        """Return the amounts up to a time that is not before ``until_s``, by key; ``keys``: only these; None: all."""
        sums, each_s = self.sums[dimension], self.each_s[dimension]
        passed_s = end_s - self.until_s
        found = {}
        for key in self.keys(dimension) if keys is None else keys:
            amounts, growth = sums.get(key), each_s.get(key)
            if growth is not None:
                start = amounts or dict.fromkeys(COLUMNS, 0.0)
                amounts = {name: start[name] + passed_s * growth[name] for name in COLUMNS}
            if amounts is not None:
                found[key] = amounts
        return found

    def keys(self, dimension: str) -> set[str]:
        """Return the keys that have amounts in the open time, or will have."""
        return self.sums[dimension].keys() | self.each_s[dimension].keys()


def _grows_from_s(history: History, tasks: Mapping[str, TaskView], settled_s: float) -> float:
    """Return the time from which amounts grow evenly."""
    last_s = max(last_bound_s(history.plans, history.incidents, history.spans, tasks.values()), settled_s, 0.0)
    return math.ceil(last_s * _GRID) / _GRID
