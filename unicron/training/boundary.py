"""A boundary section: what a script does between two steps together with its peers, which may be lost meanwhile.

    for step in run.steps():
        with step:
            ...
        if step.number % 100 == 0:
            with run.boundary():
                evaluate(run.model)

A fault inside leaves the section without an exception. A ``with`` block cannot run itself again. So the loop is given
the step once more: it is ``step.repeated`` and has nothing to compute (``unicron.training.applied_step``). Behind it
the loop comes to the section again, as a new process does. A section is done once all ranks have come to its end.
Until then it counts as not done for all ranks, and ranks that had come through it run it again.

A section that only some ranks come to would wait for ever. So it begins once all have come, and each rank reports how
many sections it has entered behind a step: a rank that has gone on with fewer than another one proves that the script
is wrong, and ends the task (``services/detector/incidents/sections.py``).
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from unicron import device
from unicron.errors import WrongLoop
from unicron.link.agent_link import AgentLink
from unicron.process.faults import FaultInjector
from unicron.training.step import Step

PLACE_CHARACTERS = 100
"""Longest name of a script's file that is reported, in every heartbeat."""


class SectionHost(Protocol):
    """What a section needs of the training (``unicron.training.generations``)."""

    link: AgentLink
    faults: FaultInjector
    step: Step | None
    """The step that the loop was given last in this generation."""
    open_section: int
    """The step behind which this rank is in a section that is not done; 0: none."""
    random: tuple[int, Callable[[], None]]
    """The step of the newest section, and what puts random generators back to how they were before it began."""
    last_step: int
    """The step behind which the training ends."""

    def meet_in_section(self, place: str) -> None:
        """Wait until all ranks have come to a place, whose name they give."""

    def gather_parameters(self) -> None:
        """Wait until the parameters that other ranks have updated have arrived on this one."""

    def heartbeat(self) -> None:
        """Report that this rank is at work on something else than a step."""

    def put_back(self) -> None:
        """Put the user's state back to what it is behind a step that is repeated."""

    def survives(self, error: BaseException) -> bool:
        """Report an error; return whether the process goes on in a new generation."""


class Section:
    """What ``Run.boundary`` returns; its ``with`` block is a part of the loop in which peers may be lost."""

    def __init__(self, host: SectionHost, *, meets: bool = True) -> None:
        """Prepare the section. ``meets``: whether parameters are whole in it, and its end waits for all ranks."""
        self._host, self.meets = host, meets
        self._failed: Exception | None = None
        """The error of the section's beginning, which its end reports: a block cannot be left before it has begun."""
        self._ends = False

    def __enter__(self) -> Section:
        """Begin the section.

        Raises:
            WrongLoop: the loop is in no step's boundary, or a step's block has not been left.
        """
        step, link = self._host.step, self._host.link
        if step is None or not (step.completed or step.left):
            raise WrongLoop("run.boundary() stands behind a step's block, in the loop over run.steps()")
        counts = step.completed and not step.left
        if counts:
            link.sections = link.sections[0] + 1, _place_in_script()
        if step.completed:
            self._host.put_back()
            self._host.open_section = step.number
            if self._host.random[0] != step.number:
                self._host.random = step.number, random_states()
        self._host.heartbeat()
        link.enter()
        if self.meets:
            try:
                if counts:
                    self._host.meet_in_section(f"section/{step.number}/{link.sections[0]}")
                self._host.gather_parameters()
            except Exception as err:
                self._failed = err
        return self

    def meet(self) -> None:
        """Have whole parameters from here on, and the section's end wait for all ranks.

        Raises:
            RuntimeError, Interrupted: a peer is lost.
        """
        self.meets = True
        self._host.gather_parameters()

    def end_training(self) -> None:
        """Have the training end behind the step of this section, as ``step.end_training()`` does.

        It is enough that one rank asks for it: the ranks agree as they meet at the section's end.

        Raises:
            WrongLoop: the ranks do not meet at the section's end.
        """
        if not self.meets:
            raise WrongLoop("section.end_training() needs a section at whose end all ranks meet: run.boundary()")
        self._ends = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End the section once all ranks have; swallow an error that a new generation answers, report every other."""
        host, step = self._host, self._host.step
        assert step is not None
        error = self._failed or error
        if error is None:
            try:
                host.faults.reached(step.number, "section")
                ends = torch.tensor([float(self._ends)], device=device.current())
                if self.meets and dist.is_initialized() and dist.get_world_size() > 1:
                    host.link.wait(dist.all_reduce(ends, async_op=True))
                host.link.synchronize()
                host.last_step = step.number if ends.item() else host.last_step
            except Exception as err:
                error = err
        host.link.leave()
        if error is None:
            host.open_section = 0
            return False
        step.left = True
        return host.survives(error)


def _place_in_script() -> str:
    """Return file and line of the newest call from outside of this library, for people."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "unicron":
        frame = frame.f_back
    name = os.path.basename(frame.f_code.co_filename).encode("ascii", "replace").decode()
    return f"{name[-PLACE_CHARACTERS:]}:{frame.f_lineno}" if name.isprintable() else ""


def random_states() -> Callable[[], None]:
    """Return a function that puts the random generators of this process back to what they are now.

    These are Python's, and numpy's, torch's and those of Megatron's tracker if these libraries are imported.
    """
    found: list[tuple[Callable[[Any], Any], Any]] = [
        (random.setstate, random.getstate()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if device.is_cuda():
        found.append((torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
    if numpy := sys.modules.get("numpy"):
        found.append((numpy.random.set_state, numpy.random.get_state()))
    if trackers := sys.modules.get("megatron.core.tensor_parallel.random"):
        tracker = trackers.get_cuda_rng_tracker()
        found.append((tracker.set_states, tracker.get_states()))

    def restore() -> None:
        for put_back, state in found:
            put_back(state)

    return restore
