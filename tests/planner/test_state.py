"""The planner's state: settled tasks are kept apart, and that makes no difference to any plan."""

from __future__ import annotations

import random

import pytest

from services.planner.state.cluster import Task
from shared.events.severities import ErrorKind, Severity
from tests.planner.kit import World


def random_course(seed: int) -> World:
    """Tasks that come, end and come again under their old names, with faults, and with events that come too late."""
    drawn = random.Random(seed)
    world = World()
    for index in range(4):
        world.join(f"n{index}", hardware="gpu" if index > 2 else "cpu")
    for _ in range(60):
        name = drawn.choice("abcde")
        task = world.state.find(name)
        if task is None or (task.life == "ended" and drawn.random() < 0.5):
            sizes = {"hidden": drawn.choice([32, 64]), "layers": 2, "heads": 4, "sequence_length": 32}
            world.complete(world.submit(name, model=sizes, weight=drawn.choice([1.0, 2.0])))
            continue
        match drawn.randrange(9):
            case 0 | 1:
                world.progress(name, task.step + 1, drawn.choice([0.01, 0.1, 1.0]))
            case 2 if task.members:
                world.complete(world.exit(drawn.choice(task.members), name))
            case 3:
                world.complete(world.finish(name) if drawn.random() < 0.5 else world.fail(name))
            case 4:
                node = drawn.choice(sorted(world.state.nodes))
                world.complete(world.lose(node) if world.state.nodes[node].usable else world.join(node))
            case 5:
                world.checkpoint(name, step=task.step + 1)
            case 6:
                # A fault for which no node is to blame, of a task that may have ended.
                world.error(ErrorKind.COLLECTIVE_TIMEOUT, task=name, severity=Severity.SEV1)
            case 7:
                # A fault of whichever task has the worker.
                world.error(ErrorKind.PROCESS_EXIT, worker=f"n{drawn.randrange(4)}/0")
            case _:
                world.stop(name)
    return world


def plans(world: World) -> list[str]:
    return [record.event.canonical() for record in world.records]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_settled_tasks_apart_make_no_difference_to_any_plan(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = random_course(seed)
    apart = [world.state.find(name) for name in world.state.ended]
    assert apart
    assert all(task is not None and task.settled for task in apart)
    assert not any(task.settled for task in world.state.tasks.values())
    assert [task.number for task in world.state.tasks.values()] == sorted(t.number for t in world.state.tasks.values())
    monkeypatch.setattr(Task, "settled", False)
    together = random_course(seed)
    assert together.state.ended == {}
    assert plans(world) == plans(together)
    assert {task.name: task for task in world.state.every_task()} == together.state.tasks
