"""What state snapshots have of the detector's state, and the program that writes one.

It is started with the position up to which the service has handled the log (``shared.service.state_keeper``).
"""

from __future__ import annotations

import sys

from services.detector.evolve import evolve
from services.detector.state.cluster import DetectorState
from shared.service import state_keeper
from shared.service.state_snapshots import KeptState, each_record

KEPT = KeptState("detector", DetectorState, each_record(evolve))

if __name__ == "__main__":
    sys.exit(state_keeper.main(KEPT, sys.argv[1:]))
