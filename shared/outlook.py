"""Outlooks: the futures by which a plan was compared with others (docs/planner.md, "More than one step ahead").

The models are a field of the ``plan.decided`` event (``shared.events``).
"""

from __future__ import annotations

from pydantic import Field

from shared.model import Model


class Valued(Model):
    """A solution, valued by futures.

    Attributes:
        label: of the solution.
        value: weighted FLOP in the mean over all futures, less what transitions cost.
        gain: by how much that is more than of ``best``; both are valued in the same futures.
        gain_error: standard error of ``gain``.
        margin: what ``gain`` has to exceed: a part of what the transitions of both cost.
    """

    label: str
    value: float
    gain: float = 0.0
    gain_error: float = 0.0
    margin: float = 0.0


class Outlook(Model):
    """The futures of a plan.

    Attributes:
        rollouts: how many futures were drawn.
        seed: from which; it follows from the plan's cause.
        horizon_s: how far they reach, seconds, for each kind of workers (one without a name if all are of one kind).
        node_loss_per_s: rate at which a usable node is lost.
        returns_s: of each node that is away, the latest first, in how many seconds it returns in the mean of the
            futures, which end with the horizon.
        choices: the solutions; the one taken first, then the most valuable first.
        checkpoint_every_s: in plans of decider 5, what ``PlanDecided.checkpoint_every_s`` has in later ones.
    """

    rollouts: int = Field(ge=1)
    seed: int = Field(ge=0)
    horizon_s: dict[str, float]
    node_loss_per_s: float
    returns_s: dict[str, float] = Field(default_factory=dict)
    choices: list[Valued] = Field(min_length=1)
    checkpoint_every_s: dict[str, float] = Field(default_factory=dict)
