"""Whether a rank's snapshots are still where a recovery would look for them.

The question is cheap, since it is asked in every step.
"""

from __future__ import annotations

import sys
from pathlib import Path

from unicron.snapshot.taker import SnapshotTaker
from unicron.snapshot.transport import Receiver


class SnapshotWatch:
    """Watches a rank's files and those that it keeps for peers; each loss is said once."""

    def __init__(self, folder: Path) -> None:
        """Args: folder: the task's, on this node."""
        self._folder = folder
        self._noted = False
        self.unmade = False
        """Whether the files could not be made since the folder was gone."""
        self.reason = ""
        """What was lost, until somebody has taken it to report it."""

    @property
    def can_store(self) -> bool:
        """Whether the folder is there. The agent makes it anew: the folder above may be that of another user."""
        return self._folder.is_dir()

    def is_lost(self, taker: SnapshotTaker | None, receiver: Receiver | None) -> bool:
        """Return whether a recovery would lack what this rank has stored, for itself or for a peer.

        Args:
            taker: the taker of this rank's snapshots; None: the rank has taken none in this generation.
            receiver: the receiver of its peers' snapshots, if there is one.
        """
        here = self.unmade or any(kept is not None and kept.is_lost for kept in (taker, receiver))
        if here and not self._noted:
            self.reason = f"in-memory copies are gone from {self._folder}: something else has removed or changed them"
            print(f"unicron: {self.reason}; new ones follow", file=sys.stderr, flush=True)
        self._noted = here
        return here or (taker is not None and not taker.is_kept_by_partner)
