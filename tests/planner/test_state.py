"""The planner's state as ``unicron replay --at -o json`` prints it: the names stay, whatever the code calls them."""

from __future__ import annotations

from tests.planner.kit import running

PRINTED = [
    "spec", "life", "generation", "members", "holders", "occupied", "lost", "broken", "plan", "planned_at", "change",
    "stands_since", "stood_s", "queued", "wait", "step", "step_s", "checkpoint", "checkpoint_step", "pool", "layout",
    "held", "ranks", "trained", "measured", "lose_steps",
]  # fmt: skip


def test_a_task_is_printed_with_the_names_it_always_had() -> None:
    world = running()
    world.exit(world.task().members[1])
    printed = world.state.model_dump(mode="json", by_alias=True)["tasks"]["a"]
    assert list(printed) == PRINTED
    assert printed["holders"] == list(world.task().owners)
    assert printed["held"] == {"tensor": 1, "pipeline": 1, "data": 4, "micro_batch": 1}
    assert printed["stands_since"] is not None
