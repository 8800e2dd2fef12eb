"""What the fold keeps with an incident for the models of other answers (``services/api/costs/counterfactuals.py``)."""

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


class StoodStill(Model):
    """What would have stood until the node of an incident is back: the tasks that the fault interrupted.

    ``workers``, ``waf_flop_per_s``: of these tasks before the fault. ``since``: when it was detected.
    """

    workers: int
    waf_flop_per_s: float
    since: datetime


class OtherAnswers(Model):
    """What the models of other answers to an incident are made of.

    ``restart``: None where the log says too little. ``solver_plan``: None if the solver made none of the plans.
    ``stood_still``: None if no node was lost or isolated, or where the log says too little; ``back_at``: when the node
    was back, or left for good.
    """

    restart: RestartCost | None = None
    solver_plan: SolverPlan | None = None
    stood_still: StoodStill | None = None
    back_at: datetime | None = None
