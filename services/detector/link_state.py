"""What the detector knows of the links between nodes. Part of its state: probes and inquiries are not in the log."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from services.detector.pairs import Pair
from shared.probes import Outcome


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a witness found out about a node (``probing.py``). ``outcome``: None if it found nothing out.

    ``round_trip_s``: between the two; None if it is not known.
    """

    outcome: Outcome | None
    asked_at: datetime
    answered_at: datetime
    round_trip_s: float | None = None


@dataclass(frozen=True, slots=True)
class Inquiry:
    """Probes among the nodes of a task, put before a fault is judged that a link may have caused (``links.py``).

    Attributes:
        since: when its first round was asked.
        asked_at: when the present round was asked.
        asked: (witness, node) of the probes of the present round.
        answered: the same, of the rounds before.
        waiting: the pairs of the further rounds (``rounds.py``).
        suspects: the pairs that an inquiry just before this one found broken.
    """

    since: datetime
    asked_at: datetime
    asked: frozenset[tuple[str, str]] = frozenset()
    answered: frozenset[tuple[str, str]] = frozenset()
    waiting: tuple[Pair, ...] = ()
    suspects: frozenset[Pair] = frozenset()


@dataclass(slots=True)
class Isolation:
    """A node that is left out, until its links work again or an operator returns it (``isolation.py``).

    Attributes:
        error: id of the error event that isolated it.
        since: when.
        return_after_s: for how long its links must work before it returns, seconds.
        until_returned: whether only an operator returns it: a lemon, or a link that has broken too often.
        asked_at: when it was last asked to probe the others. This and the next are not in the log.
        whole_since: node -> since when every probe of that node has got through.
    """

    error: str
    since: datetime
    return_after_s: float
    until_returned: bool = False
    asked_at: datetime | None = None
    whole_since: dict[str, datetime] = field(default_factory=dict)
