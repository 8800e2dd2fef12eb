"""What state snapshots have of the detector's state, and the program that writes one.

It is started with the position up to which the service has handled the log (``shared.service.state_keeper``).
"""

from __future__ import annotations

import sys
from itertools import takewhile

from services.detector.evolve import evolve
from services.detector.state.cluster import DetectorState
from shared.log.log import EventLog
from shared.service import state_keeper
from shared.service.state_snapshots import KeptState, records


def _fold(log: EventLog, state: DetectorState, after: int, until: int) -> tuple[int, DetectorState]:
    for record in takewhile(lambda each: each.position <= until, records(log, after)):
        state, after = evolve(state, record.event), record.position
    return after, state


KEPT = KeptState("detector", DetectorState, _fold)

if __name__ == "__main__":
    sys.exit(state_keeper.main(KEPT, sys.argv[1:]))
