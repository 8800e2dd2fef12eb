"""The policies of published systems, with the source of every assumption.

live_recovery.py                 systems whose tasks train on without a restart; each other one has its module
parameters.py, parameters.json   each number with its unit, its source, and how it is known
timing.py                        detection, restarts and live recoveries, as several systems have them
restriction.py                   the solver's answer where no task may take another's workers
"""

from __future__ import annotations

from services.planner.problem.problem import Solve
from simulator.policies.byterobust import BYTEROBUST
from simulator.policies.live_recovery import BAMBOO, OOBLECK, RECYCLE, TORCHFT
from simulator.policies.megatron import MEGATRON, MEGATRON_SPARES
from simulator.policies.unicron import UNICRON, UNICRON_PAPER
from simulator.policies.varuna import VARUNA
from simulator.policy import Policy

_ALL = (
    MEGATRON,
    MEGATRON_SPARES,
    VARUNA,
    BAMBOO,
    OOBLECK,
    RECYCLE,
    TORCHFT,
    BYTEROBUST,
    UNICRON_PAPER,
    UNICRON,
)

POLICIES: dict[str, Policy] = {policy.name: policy for policy in _ALL}
"""Name -> policy, in the order of reports. The oracle is no policy: it decides nothing (``simulator.oracle``)."""

SOLVES: dict[str, Solve] = {policy.name: policy.solve for policy in _ALL}
"""Name of a policy in a log -> how it answers planning problems, for replays."""
