"""Invariants of plans and state after any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.planner.decide import DECIDER
from services.planner.problem.problem import available_workers
from services.planner.replay.replay import Replayer, verify_records
from services.planner.state.cluster import State, node_of
from services.planner.throughput.tables import table_of, table_problems
from services.planner.timers import next_timer
from shared.events.plans import Problem, Solution, Stage, TaskChange
from shared.events.severities import ErrorKind, Severity
from shared.events.union import PlanDecided, TaskResultUnwritten
from shared.planning.solver import solve_with_alternatives
from tests.planner.kit import World

NODES = st.sampled_from(["n0", "n1", "n2", "n3"])
NAMES = st.sampled_from(["a", "b", "c"])
PARALLEL = st.sampled_from([(1, 1), (1, 1), (1, 1), (2, 1), (1, 2), ("auto", "auto")])
SMALL = {"layers": 2, "hidden": 32, "heads": 4, "sequence_length": 32}
LARGE = {"layers": 8, "hidden": 1536, "heads": 8, "sequence_length": 32}
"""Does not fit on one worker: where the layout may be chosen, it changes with the count."""

Sizes = tuple[int, int] | tuple[str, str]


class Planner(RuleBasedStateMachine):
    """Throws events at the planner; each plan is checked against the state it was made in."""

    @initialize(allow_pausing=st.booleans())
    def begin(self, allow_pausing: bool) -> None:
        self.problem: Problem | None = None
        """The newest problem that was solved."""
        self.world = World(self.solve, starvation_s=3600.0, allow_pausing=allow_pausing)
        self.newest: dict[str, PlanDecided] = {}
        self.reached: dict[tuple[str, int], int] = {}
        """The newest step of each generation of each task."""

    def solve(self, problem: Problem) -> tuple[Solution, list[Solution]]:
        self.problem = problem
        return solve_with_alternatives(problem)

    def check(self, before: State, plan: PlanDecided | None) -> None:
        if plan is None:
            return
        _check_tables(before, self.world.state, plan, self.problem)
        for change in plan.changes:
            self.newest[change.task] = plan
            _check_closed(before, self.world.state, change)
            _check_change(before, self.world.state, change)
        _check_state(self.world.state, plan)

    def tasks(self, life: str = "active") -> list[str]:
        return [name for name, task in self.world.state.tasks.items() if task.life == life]

    # ---- the cluster

    @rule(node=NODES, workers=st.integers(1, 3), domain=st.sampled_from(["x", "y"]))
    def join(self, node: str, workers: int, domain: str) -> None:
        before = self.world.state
        self.check(before, self.world.join(node, workers, domain))

    @rule(node=NODES)
    def lose(self, node: str) -> None:
        before = self.world.state
        self.check(before, self.world.lose(node))

    @rule(data=st.data(), how=st.sampled_from(["drain", "save", "drained", "put_back", "leave", "cordon"]))
    @precondition(lambda self: self.world.state.nodes)
    def close(self, data: st.DataObject, how: str) -> None:
        before, world = self.world.state, self.world
        node = data.draw(st.sampled_from(sorted(before.nodes)))
        match how:
            case "drain":
                self.check(before, world.drain(node, by=data.draw(st.sampled_from(["user", "agent"]))))
                self.check_empty(node)
            case "save":
                self.check(before, world.drain(node, save=True))
                self.check_empty(node)
            case "drained":
                self.check(before, world.drained(node))
            case "put_back":
                self.check(before, world.put_back(node))
            case "leave":
                self.check(before, world.leave(node))
                self.check_empty(node)
            case "cordon":
                world.cordon(node)

    def check_empty(self, node: str) -> None:
        """No task that goes on is to have a worker of the node."""
        for task in self.world.state.tasks.values():
            assert not any(node_of(worker) == node for worker in task.members)

    # ---- tasks

    @rule(
        name=NAMES,
        parallel=PARALLEL,
        least=st.integers(1, 4),
        more=st.integers(0, 5),
        weight=st.sampled_from([1.0, 2.5]),
        saved=st.booleans(),
        divided=st.booleans(),
        copied=st.booleans(),
    )
    def submit(
        self,
        name: str,
        parallel: Sizes,
        least: int,
        more: int,
        weight: float,
        saved: bool,
        divided: bool,
        copied: bool,
    ) -> None:
        task = self.world.state.tasks.get(name)
        if task is not None and task.life != "ended":
            return
        before = self.world.state
        plan = self.world.submit(
            name,
            saved="saved" if saved else "",
            step=3 if saved else 0,
            weight=weight,
            model=LARGE if parallel[0] == "auto" else SMALL,
            parallel={"tensor": parallel[0], "pipeline": parallel[1], "distributed_optimizer": divided},
            checkpoint={"every": 5, "memory_every": int(copied)},
            workers={"min": least, "max": max(least + more, 2)},
        )
        self.check(before, plan)

    @rule(data=st.data())
    @precondition(lambda self: self.tasks())
    def stop(self, data: st.DataObject) -> None:
        before = self.world.state
        self.check(before, self.world.stop(data.draw(st.sampled_from(self.tasks()))))

    @rule(data=st.data(), how=st.sampled_from(["finish", "fail"]))
    @precondition(lambda self: self.tasks())
    def end(self, data: st.DataObject, how: str) -> None:
        before = self.world.state
        name = data.draw(st.sampled_from(self.tasks()))
        self.check(before, self.world.finish(name) if how == "finish" else self.world.fail(name))

    @rule(data=st.data())
    @precondition(lambda self: self.tasks("stopping"))
    def stopped(self, data: st.DataObject) -> None:
        before = self.world.state
        self.check(before, self.world.stopped(data.draw(st.sampled_from(self.tasks("stopping")))))

    @rule(data=st.data(), step=st.integers(1, 50), step_s=st.sampled_from([0.0, 0.01, 0.5]))
    @precondition(lambda self: self.tasks())
    def progress(self, data: st.DataObject, step: int, step_s: float) -> None:
        name = data.draw(st.sampled_from(self.tasks()))
        task = self.world.task(name)
        place = (name, task.generation)
        self.reached[place] = max(step, task.step, self.reached.get(place, 0))  # no generation goes back
        self.world.progress(name, self.reached[place], step_s)

    @rule(data=st.data(), step=st.integers(1, 50))
    @precondition(lambda self: self.tasks())
    def checkpoint(self, data: st.DataObject, step: int) -> None:
        self.world.checkpoint(data.draw(st.sampled_from(self.tasks())), step)

    @rule()
    def starve(self) -> None:
        before = self.world.state
        self.check(before, self.world.age())

    # ---- faults

    @rule(data=st.data(), severity=st.sampled_from([None, None, None, Severity.SEV1]))
    def exit(self, data: st.DataObject, severity: Severity | None) -> None:
        having = [
            (name, worker)
            for name, task in self.world.state.tasks.items()
            for worker in sorted({*task.members, *task.owners})
        ]
        if not having:
            return
        name, worker = data.draw(st.sampled_from(having))
        before = self.world.state
        plan = self.world.exit(worker, task=name, severity=severity)
        assert plan.changes or before.tasks[name].life == "ended"
        self.check(before, plan)

    @rule(name=NAMES, severity=st.sampled_from(list(Severity)))
    def unnamed(self, name: str, severity: Severity) -> None:
        before = self.world.state
        self.check(before, self.world.error(ErrorKind.COLLECTIVE_TIMEOUT, task=name, severity=severity))

    # ---- transitions

    @rule(data=st.data(), whole=st.booleans())
    def carry_out(self, data: st.DataObject, whole: bool) -> None:
        tasks = self.world.state.tasks  # without those that have ended and left their workers
        under_way = [name for name, plan in self.newest.items() if name in tasks and tasks[name].plan == plan.plan]
        if not under_way:
            return
        name = data.draw(st.sampled_from(under_way))
        plan = self.newest[name]
        change = next(c for c in plan.changes if c.task == name)
        if whole:
            self.world.complete(plan.model_copy(update={"changes": [change]}))
        else:
            self.world.resume(plan, change)

    @rule(data=st.data())
    @precondition(lambda self: any(task.members for task in self.world.state.tasks.values()))
    def lend(self, data: st.DataObject) -> None:
        before = self.world.state
        names = sorted(name for name, task in before.tasks.items() if task.members)
        self.check(before, self.world.unwritten(data.draw(st.sampled_from(names))))

    @rule()
    @precondition(
        lambda self: any(isinstance(t.event, TaskResultUnwritten) for t in [next_timer(self.world.state)] if t)
    )
    def write_again(self) -> None:
        before = self.world.state
        self.check(before, self.world.write_again())

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        report = verify_records(self.world.records)
        assert report.mismatches == []
        assert report.verified == report.plans
        # What holds of every plan holds of these: an honest log of an older decider passes.
        older = Replayer(self.world.records, decider=DECIDER + 1).verify()
        assert older.mismatches == []
        assert (older.verified, older.older, older.ok) == (0, report.plans, True)
        assert Replayer(self.world.records).state_at() == self.world.state


def _check_stage(stage: Stage, after: State) -> None:
    assert [m.rank for m in stage.members] == list(range(len(stage.members)))
    assert stage.layout.world_size == len(stage.members) > 0
    assert len({m.worker for m in stage.members}) == len(stage.members)
    for member in stage.members:
        assert member.node == node_of(member.worker)
        assert after.usable(member.worker)
    sources = {m.source for m in stage.members}
    if "take" in sources:
        assert "live" in sources
        if stage.layout.world_size == stage.layout.data:
            assert stage.members[0].source == "live"
    assert not sources & {"checkpoint", "initial"} or len(sources) == 1
    if stage.complete:
        assert ("checkpoint" in sources) == (stage.checkpoint != "")
    else:
        assert "live" in sources


def _check_tables(before: State, after: State, plan: PlanDecided, solved: Problem | None) -> None:
    """The log says what was solved, and each table once."""
    if plan.problem is None:
        assert after.tables == before.tables
        return
    assert plan.problem.with_tables(after.tables) == solved
    assert list(table_problems(before.tables, plan)) == []
    assert not plan.tables.keys() & before.tables.keys()
    assert after.tables.keys() == {task.table for task in plan.problem.tasks}
    assert plan.inputs_sha256 == plan.problem.sha256()


def _check_closed(before: State, after: State, change: TaskChange) -> None:
    """A task gets no worker of a closed node that it did not have."""
    old = before.tasks.get(change.task)
    had = {*old.members, *old.owners, *old.occupied} if old is not None else set()
    for stage in change.stages:
        for member in stage.members:
            assert after.nodes[member.node].open or member.worker in had


def _check_change(before: State, after: State, change: TaskChange) -> None:
    old = before.find(change.task)
    stages = change.stages
    generations = [s.generation for s in stages]
    first = old.generation if old is not None else 0
    assert change.from_generation == first
    assert generations == list(range(first + 1, first + 1 + len(generations)))
    for stage in stages:
        _check_stage(stage, after)
    survivors, failed, release = set(change.survivors), set(change.failed), set(change.release)
    assert not survivors & failed
    assert not release & failed
    assert all(after.usable(w) for w in change.release)
    assert (change.action == "move") == (change.target is not None)
    if old is not None and not (old.spec.checkpoint.memory_every and change.survivors):
        assert all(stage.complete for stage in stages)
    if change.interrupted is not None:
        assert change.hold
        finishing = [m.worker for m in change.interrupted.members]
        assert set(finishing) <= survivors
        assert len(finishing) == change.interrupted.layout.world_size
        if change.interrupted.layout.world_size == change.interrupted.layout.data:
            assert finishing == change.survivors
        assert {m.source for m in change.interrupted.members} == {"live"}
    staying = {m.worker for m in stages[-1].members} if change.action in ("move", "none") else set()
    assert not release & staying
    assert set(change.prepare) == staying - survivors
    if old is not None:
        # No process of the task is forgotten: it stays, or it is ended.
        unaccounted = {w for w in old.occupied if _same_node(before, after, w)} - staying - failed - release
        assert unaccounted == set()
        # A process whose state is not known never counts as an owner of the state.
        assert survivors <= set(old.owners)


def _same_node(before: State, after: State, worker: str) -> bool:
    """Whether a process that was on the worker may still be there."""
    old, new = (state.nodes[node_of(worker)] for state in (before, after))
    return new.usable and old.incarnation == new.incarnation


def _check_state(state: State, plan: PlanDecided) -> None:
    members = [w for task in state.tasks.values() for w in task.members]
    assert len(members) == len(set(members)) <= len(state.usable_workers())
    for task in state.tasks.values():
        assert not task.lost
        assert not task.broken
        count = len(task.members)
        assert count % task.replica_size == 0
        if count:
            assert task.life == "active"
            assert task.spec.workers.min <= count <= (task.spec.workers.max or count)
            assert task.name not in plan.queued
        elif task.life == "active":
            assert plan.queued[task.name]
            useful = table_of(state, task).counts
            free = len(available_workers(state)) - len(members)
            if plan.problem is not None and useful and not task.leaving:
                assert free < useful[0]


# A failing sequence is not shrunk: that may take minutes, and its steps are printed as they are.
Planner.TestCase.settings = settings(
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
test_any_sequence_of_events = pytest.mark.timeout(300)(Planner.TestCase)  # long on a busy machine
