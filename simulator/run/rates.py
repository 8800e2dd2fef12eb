"""How fast a task trains: the planner's throughput model, the policy's efficiency, and slow workers."""

from __future__ import annotations

from collections.abc import Mapping

from services.planner.state.cluster import HardwareLayout, State, node_of
from services.planner.state.deals_by_speed import replica_slowdowns, slowdown_of_deal
from services.planner.throughput.model import flop_per_step, hardware_of, modelled_flop_per_s
from shared.events.plans import Layout
from shared.tasks.specification import TaskSpec
from simulator.policy import Policy
from simulator.run.training import Formation


class Rates:
    """Rates of tasks under a policy.

    Args:
        policy: its efficiency, and whether only whole replicas of the allotment's layout count.
        hardware: kind of all workers.
        layouts: of each task's allotment.
        throughput: measured over modelled, by task; 1 where nothing is given.
    """

    def __init__(
        self, policy: Policy, hardware: str, layouts: Mapping[str, Layout], throughput: Mapping[str, float]
    ) -> None:
        self._policy = policy
        self._hardware = hardware
        self._layouts = layouts
        self._throughput = throughput

    def steps_per_s(self, state: State, spec: TaskSpec, formation: Formation, slowdowns: Mapping[str, float]) -> float:
        """Return the steps per second of a task.

        Args:
            state: of the planner, for the size of nodes.
            spec: of the task.
            formation: what it trains on.
            slowdowns: of the nodes that are slower than others.
        """
        layout = self._used(spec.name, formation)
        if layout is None:
            return 0.0
        place = HardwareLayout(self._hardware, layout.tensor, layout.pipeline, layout.data)
        modelled = modelled_flop_per_s(spec, place, hardware_of(state, self._hardware))
        healthy = modelled * self._throughput.get(spec.name, 1.0) * self._policy.efficiency
        return healthy / slowdown_of(formation, slowdowns) / flop_per_step(spec)

    def _used(self, task: str, formation: Formation) -> Layout | None:
        """Return the layout that computes; None if no whole replica is there."""
        allotted = self._layouts.get(task)
        if not self._policy.replica_granular or allotted is None:
            return formation.layout
        replicas = min(len(formation.members) // (allotted.tensor * allotted.pipeline), allotted.data)
        return allotted.model_copy(update={"data": replicas}) if replicas else None


def slowdown_of(formation: Formation, slowdowns: Mapping[str, float]) -> float:
    """Return by how much slow nodes hold a task up: its slowest worker does, unless micro-batches are dealt by speed.

    ``services.planner.state.deals_by_speed`` has the same model of what the planner knows; this one is of what is.
    """
    slow = {node for node in slowdowns if node in formation.nodes}
    if not slow:
        return 1.0
    workers = {worker: slowdowns.get(node_of(worker), 1.0) for worker in formation.members}
    if formation.shares:
        replicas = replica_slowdowns(formation.layout, formation.members, workers)
        return slowdown_of_deal(formation.shares, replicas)
    return max(workers.values())
