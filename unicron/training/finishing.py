"""The ends of a training: a stop, and what is behind the last step.

The state stays until what replaces it is durable. Ranks whose result cannot be written keep the state in their memory,
copy it to their nodes' memory as well, say why they wait, and try again. Meanwhile they answer holds and requests, so
that a fault, a drain and a stop go as they do between two steps.
"""

from __future__ import annotations

import time
from typing import Protocol

from unicron.checkpoint import storage
from unicron.checkpoint.writer import Outcomes
from unicron.link import reporting
from unicron.link.agent_link import DRAIN, NOTHING, STOP, STOP_UNSAVED, AgentLink
from unicron.protocol import environment
from unicron.protocol.messages import CheckpointFailed, Configure, Finished, Stopped
from unicron.result import Result, agreed
from unicron.snapshot.snapshots import STORING, Snapshots
from unicron.state.rank_state import RankState
from unicron.state.user_state import UserState

FIRST_WAIT_S = 1.0
"""Pause before the second try: a hiccup of a file system takes no longer."""

LONGEST_WAIT_S = 10.0
"""Longest pause between two later tries; each pause is twice as long as the one before. So the result is written soon
after the storage is back."""

LOOK_S = 0.5
"""How often ranks that wait look for a hold and for requests, and show that they live."""


class Host(Protocol):
    """What the end of a training needs from the training (``unicron.training.generations``)."""

    link: AgentLink
    snapshots: Snapshots
    user: UserState
    outcomes: Outcomes
    """The reporter of this generation's checkpoints to the agent."""
    request: int
    """What the agent requests, as all ranks have agreed."""
    last_loss: float | None
    """The loss of the last update; None: unknown to this rank."""
    runs_script: bool
    """Whether a user's script may go on behind the last step."""

    @property
    def rank_state(self) -> RankState:
        """The rank's state."""

    @property
    def configure(self) -> Configure:
        """The generation."""

    def save(self) -> tuple[str, str]:
        """Write a checkpoint of this state, unless there is one; return its place, and why there is none."""

    def complete_checkpoint(self) -> str:
        """Wait for the checkpoint in progress, if any; return why it was given up, empty if it was not."""

    def show_writing(self) -> None:
        """Report that this rank writes, or waits until it can."""

    def meet(self) -> None:
        """Wait for all ranks: the process that goes on from here may end."""


def save_and_stop(host: Host) -> None:
    """Write the checkpoint that a stop leaves behind, and stop, also without it if steps may be lost; else return."""
    host.complete_checkpoint()
    location, reason = host.save()
    link, step = host.link, host.rank_state.applied
    if not reason or host.request == STOP_UNSAVED:
        host.meet()
        link.send(Stopped(generation=link.generation, rank=link.rank, step=step, path="" if reason else location))
        link.exit(0)
    host.request = NOTHING
    link.refuse_stop(step, reason[: reporting.DETAIL_CHARACTERS])


class Finishing:
    """The end of a training behind the last step, in one generation."""

    def __init__(self, host: Host, *, can_save: bool) -> None:
        """Begin: nothing is written yet. ``can_save``: whether there is a place for checkpoints."""
        self._host, self._result, self._can_save = host, Result(), can_save
        # The outcome of the checkpoint here is a part of the report on the result.
        host.outcomes = host.outcomes._replace(failed=lambda step, reason: None)
        self._finished: Finished | None = None
        self._copied = self._saved = False
        self._folders: list[str] = []
        """Local folders that the newest try could not write to."""
        self._began_s = time.monotonic()

    def until_written(self) -> Finished | None:
        """Write the result, all ranks together, until it is written; return what this rank reports.

        The state is saved, too, if the result cannot be written at once, so that a task that is resumed has only that
        left to do; and if a script goes on behind the last step, so that a failure there repeats only that.

        Returns:
            None where the agent asks the ranks to move first: ``host.request`` is ``DRAIN``.

        Raises:
            Interrupted: the generation is held.
            RuntimeError: a peer was lost.
            OSError: it cannot be written, and there is no agent to wait with.
        """
        self._host.request, wait_s = NOTHING, FIRST_WAIT_S
        while reason := self._write():
            self._tell(reason)
            request = self._host.request = self._rest(wait_s)
            if request == DRAIN:
                return None
            if request >= STOP:
                save_and_stop(self._host)
            wait_s = min(2.0 * wait_s, LONGEST_WAIT_S)
        return self._finished

    def _write(self) -> str:
        """Write what is not written yet; return why something could not be written, the same on all ranks."""
        host, unsaved, self._folders = self._host, "", []
        if host.runs_script:
            unsaved = self._save()
        if self._finished is None:
            finished, missing = self._result.write(
                host.configure, host.rank_state, host.last_loss, host.link.wait, self._look
            )
            if missing:
                self._folders.append(f"{host.configure.directory}/result")
                unsaved = unsaved or self._save()
                nor = f", nor a checkpoint: {unsaved}" if unsaved else ""
                return f"the result cannot be written: {missing}{nor}"
            self._finished = finished
        return f"their state cannot be saved: {unsaved}" if unsaved else ""

    def _save(self) -> str:
        if not self._can_save:
            return ""
        location, reason = self._host.save()
        self._saved = not reason
        if reason and not storage.is_url(location):
            self._folders.append(location)
        return reason

    def _lends(self) -> bool:
        """Return whether the processes may end until the result can be written: the state is kept elsewhere."""
        host, waited_s = self._host, time.monotonic() - self._began_s
        copies = host.snapshots
        kept = self._saved or (self._copied and not copies.renews and copies.stored == host.rank_state.applied)
        return kept and waited_s >= environment.number(environment.LEND_AFTER_S)

    def _look(self) -> None:
        """Show that this rank lives; leave if the generation is held."""
        self._host.link.check()
        self._host.show_writing()

    def _tell(self, reason: str) -> None:
        host = self._host
        if not host.link.supervised:
            raise OSError(reason)
        if host.configure.rank == 0:
            lends = self._lends()
            host.link.send(
                CheckpointFailed(
                    generation=host.configure.generation,
                    rank=host.configure.rank,
                    step=host.rank_state.applied,
                    reason=f"all steps are done, and {reason}"[: reporting.DETAIL_CHARACTERS],
                    lends=lends,
                    folders=self._folders if lends else [],
                )
            )

    def _rest(self, wait_s: float) -> int:
        """Wait until the next try, or until a request; return the request that all ranks agree on."""
        link, due_s = self._host.link, time.monotonic() + wait_s
        while True:
            self._look()
            self._keep_copy()
            request = agreed(link.request, link.wait)
            waits = agreed(int(time.monotonic() < due_s), link.wait)
            if request != NOTHING or not waits:
                return request
            time.sleep(LOOK_S)

    def _keep_copy(self) -> None:
        """Copy the state to the nodes' memory, too: a process that ends while it waits then costs no step."""
        host, snapshots = self._host, self._host.snapshots
        status = agreed(snapshots.status, host.link.wait)
        lack = snapshots.agreed(status)
        reporting.report_copies(host.link, host.configure, host.rank_state.applied, lack)
        if status != STORING and snapshots.steps and (snapshots.renews or not self._copied):
            snapshots.begin(host.rank_state, host.user.record)
            self._copied = True
