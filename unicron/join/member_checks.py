"""What a rank knows of the members of its generation, and when it compares them (``unicron.join.comparison``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from unicron.errors import MemberDiffers, PeerDiffers
from unicron.join import comparison, identity
from unicron.join.agreement import Report
from unicron.join.comparison import Members
from unicron.join.identity import Identity
from unicron.join.own_identity import OwnIdentity
from unicron.link.agent_link import AgentLink
from unicron.link.waiting import Wait
from unicron.protocol.messages import Configure, Identified
from unicron.state.rank_state import RankState


class MemberChecks:
    """The comparisons of one process, over all its generations."""

    def __init__(self, own: OwnIdentity) -> None:
        """Begin with a process that has not trained.

        Args:
            own: the identity of this process.
        """
        self._own = own
        self._members = Members(proven=())
        self.proven = False
        """Whether this process has trained, and its parameters were equal to those of the others."""
        self.uncompared = False
        """Whether a newcomer had a part in the newest update, behind which nothing could be compared since."""
        self.undoes = False
        """Whether the newest update is to be undone: a member that had a part in it differs."""
        self.keeps_state = False
        """Whether the state that the members of this generation begin with is to be kept until the comparison behind
        their first update; the same on all. It is not kept if a newcomer may have had a part in it already."""

    def note(self) -> None:
        """Look at the modules that were imported since the last call, as they are now."""
        self._own.note()

    def digest(self) -> int:
        """Return the digest of this process's identity."""
        return identity.digest(self._own.fields)

    def enter(self, reports: Sequence[Report], recorded: Identity, wait: Wait) -> None:
        """Compare what the members are beside their state, as they join. All members call it.

        Args:
            reports: those of all members, by rank.
            recorded: what the log has of the task; empty: nothing.
            wait: waits for a collective.

        Raises:
            MemberDiffers: this process is not what the others are.
            PeerDiffers: another process is not, and leaves.
            RuntimeError: a member was lost meanwhile.
        """
        proven = [rank for rank, report in enumerate(reports) if report.proven]
        shards = len({report.coordinate for report in reports})
        self._members = Members(proven=proven, shards=shards, recorded=recorded)
        newcomers = [report for report in reports if not report.proven]
        undoes = any(report.undoes for report in reports)
        compared = undoes or not any(report.uncompared for report in reports)
        self.keeps_state = bool(proven and newcomers) and compared and all(r.complete < 0 for r in newcomers)
        digests = [report.identity for report in reports]
        comparison.check_identities(digests, lambda: self._own.fields, self._members, wait)

    def begin(self, reports: Sequence[Report]) -> None:
        """Note that all members have the state that they have agreed on, before an update that is undone."""
        if any(report.undoes for report in reports):
            self.undoes = self.uncompared = False

    def before_update(self, rank_state: RankState, wait: Wait) -> None:
        """Compare the hyperparameters of a generation's first update. If that fails, nothing of its step is kept.

        Raises:
            MemberDiffers, PeerDiffers, RuntimeError: as ``enter``.
        """
        if rank_state.partial is None or dist.get_world_size() == 1:
            return  # the step that follows reports an update outside of a step
        try:
            comparison.check_hyperparameters(rank_state, self._members, wait)
        except Exception:
            rank_state.partial.distrusted = True
            raise
        self.uncompared = len(self._members.proven) < dist.get_world_size()

    def behind_update(self, rank_state: RankState, configure: Configure, link: AgentLink) -> None:
        """Compare the parameters behind that update; report what the members are, if none of them had trained.

        Raises:
            MemberDiffers, PeerDiffers, RuntimeError: as ``enter``; after the first two the update is to be undone.
        """
        if configure.world_size > 1:
            if rank_state.gather is not None:
                rank_state.gather.finish(link.synchronize)
            try:
                comparison.check_parameters(rank_state, self._members, link.wait)
            except (MemberDiffers, PeerDiffers):
                self.undoes = True
                raise
        self.proven, self.uncompared = True, False
        if configure.rank == 0 and not self._members.proven:
            number, step = configure.generation, rank_state.applied
            link.send(Identified(generation=number, rank=0, step=step, identity=identity.recordable(self._own.fields)))
