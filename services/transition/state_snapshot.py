"""What state snapshots have of the transition service's state, and the program that writes one.

It is started with the position up to which the service has handled the log (``shared.service.state_keeper``).
"""

from __future__ import annotations

import sys
from itertools import takewhile

from services.transition.evolve import evolve
from services.transition.state import Logged, State
from shared.log.log import EventLog
from shared.service import state_keeper
from shared.service.state_snapshots import KeptState, records


def _fold(log: EventLog, state: State, after: int, until: int) -> tuple[int, State]:
    for record in takewhile(lambda each: each.position <= until, records(log, after)):
        state, after = evolve(state, Logged(record)), record.position
    return after, state


KEPT = KeptState("transition", State, _fold)

if __name__ == "__main__":
    sys.exit(state_keeper.main(KEPT, sys.argv[1:]))
