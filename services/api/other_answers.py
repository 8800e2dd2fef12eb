"""What the fold keeps with an incident for the models of other answers (``services/api/counterfactuals.py``)."""

from __future__ import annotations

from datetime import datetime

from shared.model import Model


class RestartCost(Model):
    """What a plain restart would have cost, by its model."""

    worker_s: float
    lost_flop: float


class SolverPlan(Model):
    """The first plan of the solver that answered an incident. ``gain_flop_per_s``: as of ``PlanView``."""

    position: int
    decided_at: datetime
    gain_flop_per_s: float | None


class OtherAnswers(Model):
    """What the models of other answers to an incident are made of.

    ``restart``: None where the log says too little. ``solver_plan``: None if the solver made none of the plans.
    """

    restart: RestartCost | None = None
    solver_plan: SolverPlan | None = None
