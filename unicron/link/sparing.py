"""Whether a hold spares this rank's replica: which ranks are lost, and for how long the replica may go on.

A replica of several ranks (tensor or pipeline parallelism) that has lost none of them can compute the rest of its
micro-batches, which somebody has to compute in any case. Its ranks do not agree on where to stop: each of them computes
all of its micro-batches of the step and leaves behind them. So no rank waits for a peer that has left at an earlier
micro-batch, and nothing is spent on an agreement while all is well.

No threads and no clocks here: ``unicron.link.collectives`` guards these objects, and says what time it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from unicron.protocol import environment

FINISH_FACTOR = 2.0
"""A replica counts as stuck after this multiple of its longest micro-batch. Between two there is one; the detector
takes a rank for hanging after three whole steps (``hang_factor`` of its settings), and should find the one that hangs
alone, not the peers that wait for it."""

UNMEASURED_S = 20.0
"""The limit before a first micro-batch is finished, in which backends connect and compile: as long as the members of a
generation wait for one another when it begins."""


class Sparing:
    """What one rank knows of the hold of its generation, and of its own micro-batches."""

    def __init__(self) -> None:
        """Start outside of any generation: nothing is spared."""
        self._floor_s = environment.number(environment.FINISH_FLOOR_S)
        self._replica: frozenset[str] = frozenset()
        self._members: list[str] = []
        self._broken = False
        self._lost: set[str] = set()
        self._computes = False
        self.waits_for_others = False
        """Whether the passes wait, on a device, for collectives with other replicas: for gathered parameters."""
        self.finished = False
        """Whether this rank has left behind its last micro-batch, in a hold that spares its replica: its peers may
        still compute."""
        self._progress_s = 0.0
        """When this rank began its passes or finished a micro-batch last, or when the generation was held."""
        self._longest_s = 0.0
        """This rank's longest micro-batch."""

    def join(self, workers: Iterable[str]) -> None:
        """Begin a generation with these workers, in the order of ranks. Its groups are not made yet."""
        self._members = list(workers)
        self._replica = frozenset()
        self._lost, self._broken, self._computes, self.finished = set(), False, False, False

    def set_replica(self, ranks: Collection[int]) -> None:
        """Set the ranks of this rank's replica, once the groups are made."""
        self._replica = frozenset(self._members[rank] for rank in ranks)

    @property
    def has_peers(self) -> bool:
        """Whether the replica has other ranks than this one."""
        return len(self._replica) > 1

    def hold(self, lost: Iterable[str], now_s: float) -> None:
        """Note a hold of the generation, or one more.

        Args:
            lost: the workers whose ranks are lost; none: it is not known who is.
            now_s: the time.
        """
        members = set(lost).intersection(self._members)
        if not members or not self.has_peers or members & self._replica:
            self.break_off()
        elif not self._lost:
            self._progress_s = max(self._progress_s, now_s)
        self._lost |= members

    def break_off(self) -> None:
        """Note that nothing of this generation is spared any more."""
        self._broken = True

    def begin_passes(self, now_s: float) -> None:
        """Note that this rank computes micro-batches from here on."""
        self._computes, self.finished, self._progress_s = True, False, now_s

    def finish_micro_batch(self, now_s: float) -> None:
        """Note that this rank has finished a micro-batch."""
        self._longest_s = max(self._longest_s, now_s - self._progress_s)
        self._progress_s = now_s

    def end_passes(self) -> None:
        """Note that this rank computes no more micro-batches in this step."""
        self._computes = False

    @property
    def limit_s(self) -> float:
        """For how long after a hold this rank may go without finishing a micro-batch."""
        return max(self._floor_s, FINISH_FACTOR * self._longest_s if self._longest_s else UNMEASURED_S)

    def spares(self, now_s: float) -> bool:
        """Return whether the replica's own groups stay as they are although the generation is held."""
        if self._lost and now_s - self._progress_s > self.limit_s:
            self.break_off()  # this is for good: what is broken off does not come back
        return self._computes and bool(self._lost) and not self._broken and not self.waits_for_others
