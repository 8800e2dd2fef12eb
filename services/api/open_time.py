"""The open time: what is not settled yet, which requests settle once for each state of the projections.

Behind the latest time that the log says anything of, each second of each worker goes to the same claim as the second
before, until the log has a further event. So amounts grow evenly from then on: it takes one settlement, up to a second
behind that time, to know the amounts up to any later present.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from services.api.claim_times import last_bound_s
from services.api.ledger import History, ledger
from services.api.settlement import COLUMNS, Amounts, Sums, sums_of
from services.api.span_claims import Window
from services.api.views import TaskView

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
    def of(
        cls,
        history: History,
        tasks: Mapping[str, TaskView],
        settled_s: float,
    ) -> OpenTime:
        """Settle the time from ``settled_s`` on.

        Args:
            history: as for ``settle_window``.
            tasks: the same.
            settled_s: when the open time begins, seconds since the epoch.
        """
        last_s = max(last_bound_s(history.plans, history.incidents, history.spans, tasks.values()), settled_s, 0.0)
        until_s = math.ceil(last_s * _GRID) / _GRID
        behind = Window(until_s, until_s + 1.0)
        book = ledger(history, datetime.fromtimestamp(behind.end_s, UTC), Window(settled_s, behind.end_s))
        passed = Window(settled_s, until_s)
        return cls(
            until_s,
            sums=sums_of(book.within(passed), history, tasks, passed),
            each_s=sums_of(book.within(behind), history, tasks, behind),
        )

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
