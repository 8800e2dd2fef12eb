"""Invariants under replies in any order, failures at any command, and plans that supersede at any moment."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from services.transition.state import Outcome, Send, Timer, TimerName, node_of
from shared.events.plans import Stage, TaskChange
from shared.messages.commands import ConfigureTask, DrainTask, HoldTask, Prepare, ReleaseTask, StopTask
from tests.transition.drive import Drive, change, stage

WORKERS = [f"n{node}/{slot}" for node in range(3) for slot in range(2)]
TASKS = ("a", "b")


class World(Drive):
    """Plans like a planner that knows which task has which workers, and checks every command that is sent."""

    def __init__(self) -> None:
        super().__init__(tasks=TASKS)
        self.has: dict[str, list[str]] = {task: [] for task in TASKS}
        """Task -> the workers in its newest plan."""
        self.alive: dict[str, set[str]] = {task: set() for task in TASKS}
        """Task -> the workers on which its process was started and has not been released."""
        self.still: dict[tuple[str, str], set[str]] = {}
        """Plan and task -> the workers that were held, drained or prepared."""
        self.generation = dict.fromkeys(TASKS, 0)
        self.configured = dict.fromkeys(TASKS, 0)
        self.saves: list[str] = []
        """Tasks whose workers have saved the state, which the log does not yet know."""
        self.seen = 0
        self.count = 0

    def decide_plan(self, wanted: Sequence[list[str]], broken: Sequence[bool], failed: Sequence[list[str]]) -> None:
        self.count += 1
        changes = []
        for task, workers, is_broken, gone in zip(TASKS, wanted, broken, failed, strict=True):
            workers = [w for w in workers if node_of(w) not in self.state.lost]
            had = self.has[task]
            # Like the planner, count only on workers of the old plan whose process was started.
            survivors = [
                w for w in had if w in self.alive[task] and w not in gone and node_of(w) not in self.state.lost
            ]
            lost = [w for w in had if w not in survivors]
            if not workers:
                one = change(task, action="pause", survivors=survivors, failed=lost, hold=is_broken, release=survivors)
            else:
                one = self._move(task, workers, survivors, lost, is_broken)
            self.has[task] = workers
            changes.append(one)
        self.plan(f"plan-{self.count}", *changes)

    def _move(self, task: str, workers: list[str], survivors: list[str], lost: list[str], broken: bool) -> TaskChange:
        interrupted: Stage | None = None
        if broken and survivors:
            self.generation[task] += 1
            interrupted = stage(self.generation[task], survivors, interrupted=True)
        self.generation[task] += 1
        return change(
            task,
            survivors=survivors,
            failed=lost,
            hold=interrupted is not None,
            interrupted=interrupted,
            release=[w for w in survivors if w not in workers],
            prepare=[w for w in workers if w not in survivors],
            target=stage(self.generation[task], workers, "live" if survivors else "initial"),
        )

    # ---- effects of the commands, and the invariants when they are sent

    def watch(self) -> None:
        for send in self.sent[self.seen :]:
            self._sent(send)
        self.seen = len(self.sent)

    def _sent(self, send: Send) -> None:
        command = send.command
        if isinstance(command, Prepare):
            for worker in command.workers:
                others = [t for t in TASKS if t != command.task and worker in self.alive[t]]
                assert not others, f"{worker} prepared for {command.task} while {others} has it"
            self.alive[command.task] |= set(command.workers)
        if isinstance(command, ConfigureTask):
            self._configuring(command)

    def _configuring(self, command: ConfigureTask) -> None:
        task = command.task
        assert command.generation >= self.configured[task], "generations only rise"
        self.configured[task] = command.generation
        open_ = {s.command.generation for s in self.open("configure", task)}
        assert len(open_) == 1, "one generation of a task is configured at a time"
        planned = self.plans[command.plan, task]
        ready = self.still.get((command.plan, task), set())
        if command.stage.kind == "boundary":
            alive = [w for w in planned.survivors if node_of(w) not in self.state.lost]
            assert set(alive) <= ready, "a survivor still trains"
            assert set(planned.prepare) <= ready, "a process is not up"
        else:
            assert set(planned.survivors) <= ready, "a survivor is not held"

    def done(self, send: Send) -> None:
        command = send.command
        key = (command.plan, command.task)
        if isinstance(command, HoldTask | DrainTask | Prepare):
            self.still.setdefault(key, set()).update(command.workers)
        if isinstance(command, ReleaseTask | StopTask):
            self.alive[command.task] -= set(command.workers)
        if isinstance(command, StopTask) and command.task not in self.saves:
            self.saves.append(command.task)

    def save(self) -> None:
        """Log where the state of one task was saved."""
        self.stopped(self.saves.pop(0), step=7)

    def gone(self, node: str) -> None:
        for workers in self.alive.values():
            workers -= {w for w in workers if node_of(w) == node}


@st.composite
def shares(draw: st.DrawFn) -> list[list[str]]:
    """Disjoint sets of workers, of any size, one for each task."""
    order = draw(st.permutations(WORKERS))
    cut = draw(st.integers(0, len(order)))
    end = draw(st.integers(cut, len(order)))
    return [sorted(order[:cut]), sorted(order[cut:end])]


@given(data=st.data())
@settings(deadline=None, derandomize=True)
def test_any_order_any_failure_any_supersession(data: st.DataObject) -> None:
    world = World()
    plans = data.draw(st.integers(1, 3), label="plans")
    losable = data.draw(st.booleans(), label="a node may be lost")

    def plan() -> None:
        broken = data.draw(st.tuples(st.booleans(), st.booleans()), label="broken")
        failed = [data.draw(st.lists(st.sampled_from(WORKERS), max_size=2), label="failed") for _ in TASKS]
        world.decide_plan(data.draw(shares(), label="shares"), broken, failed)

    plan()
    world.watch()
    for _ in range(400):
        actions: list[str] = []
        if world.waiting:
            actions += ["answer"] * 12 + ["refuse", "die", "silence", "fence"]
        fireable = [t for t in world.timers if t.name is not TimerName.WAIT or not world.waiting]
        if fireable:
            actions.append("fire")
        if world.saves:
            actions.append("save")
        if not actions:
            if world.count >= plans:
                break
            plan()
            world.watch()
            continue
        if world.count < plans:
            actions.append("plan")
        if losable and not world.state.lost:
            actions.append("lose")
        step(world, data, data.draw(st.sampled_from(actions)), fireable, plan)
        world.watch()
    assert not world.waiting, "the run does not end"
    assert set(world.outcomes) == set(world.plans), "every part ends, each once"
    check_events(world)


def step(world: World, data: st.DataObject, action: str, fireable: list[Timer], plan: object) -> None:
    if action == "plan":
        assert callable(plan)
        plan()
    elif action == "fire":
        world.fire(data.draw(st.sampled_from(fireable)))
    elif action == "save":
        world.save()
    elif action == "lose":
        node = data.draw(st.sampled_from(["n0", "n1", "n2"]))
        world.gone(node)
        world.lose(node)
    else:
        send = data.draw(st.sampled_from(list(world.waiting.values())))
        if action == "answer":
            world.done(send)
            world.reply(send)
        elif action == "silence":
            world.silence(send)
        else:
            code = {"refuse": "internal", "die": "process-exited", "fence": "fenced"}[action]
            world.reply(send, ok=False, code=code)


def check_events(world: World) -> None:
    """Check the last event of each part: ``complete`` if done, ``failed`` if failed, neither if superseded."""
    for (name, task), outcome in world.outcomes.items():
        moved = [m for m in world.moved if (m.plan, m.task) == (name, task)]
        final = [m for m in moved if m.complete or m.phase == "failed"]
        if outcome is Outcome.SUPERSEDED:
            assert final == []
        elif moved:
            assert final == moved[-1:]
            assert (final[0].phase == "failed") is (outcome is Outcome.FAILED)
        for m in moved:
            assert m.started_at <= m.occurred_at
            assert all(seconds >= 0 for seconds in m.durations_s.values())


@given(st.data())
@settings(deadline=None, derandomize=True)
def test_without_failures_every_exchange_of_workers_completes(data: st.DataObject) -> None:
    """No cycle of waiting tasks forms, in whatever order agents reply."""
    world = World()
    for _ in range(3):
        world.decide_plan(data.draw(shares()), (False, False), ([], []))
        world.watch()
        while world.waiting or world.saves:
            send = data.draw(st.sampled_from([*world.waiting.values(), *(None for _ in world.saves)]))
            if send is None:
                world.save()
            else:
                world.done(send)
                world.reply(send)
            world.watch()
    assert set(world.outcomes.values()) == {Outcome.DONE}
    assert all(m.phase != "failed" for m in world.moved)
