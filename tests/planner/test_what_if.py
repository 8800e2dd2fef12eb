"""What-if replay: recorded causes decided again with other inputs; consequences, times and causes as recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from cli.records.replay import replay
from services.planner.decide import DECIDER
from services.planner.replay import what_if
from services.planner.replay.replay import Replayer
from services.planner.replay.what_if import Comparison
from services.planner.replay.what_if_inputs import SettingsInput, parse_inputs
from shared.errors import InvalidInput
from shared.events.union import ClusterConfigured, PlanDecided
from shared.log.log import EventLog
from shared.settings.model import Settings
from tests.examples import examples
from tests.logs.kit import GOLDEN, read_rows, restore
from tests.planner.kit import World


def two_tasks() -> World:
    """Two tasks alike that share 12 workers; one node is lost for a minute, the price rises, ``b`` ends."""
    world = World()
    for index in range(6):
        world.join(f"n{index}")
    world.complete(world.submit("a"))
    world.complete(world.submit("b"))
    world.wait(100.0)
    world.exit(world.task("a").members[0])
    world.complete(world.lose("n1"))
    world.wait(60.0)
    configured = ClusterConfigured(
        **(world.state.config.model_dump() if world.state.config else {})
        | {**world.base(), "price_per_worker_hour": 4.0}
    )
    world.log(configured)
    world.complete(world.join("n1"))
    world.wait(50.0)
    world.complete(world.finish("b"))
    world.progress("a", step=9, step_s=0.1)
    return world


@pytest.fixture(scope="module")
def world() -> World:
    return two_tasks()


def asked(world: World, text: str) -> Comparison:
    return Replayer(world.records).what_if(parse_inputs(text))


def test_no_changed_input_changes_nothing(world: World) -> None:
    for text in ("", "{}", "tasks: {}", "tasks: {a: {}, b: {workers: {}}}", "settings: {}"):
        found = asked(world, text)
        assert (found.differing, found.differences) == (0, [])
        assert found.plans == sum(isinstance(r.event, PlanDecided) for r in world.records)
        assert (found.model.worker_s, found.model.money) == (found.measured.worker_s, found.measured.money)
        assert found.model.waf_flop == 0.0
        assert all(task.recorded_worker_s == task.what_if_worker_s for task in found.tasks)


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_no_changed_input_changes_nothing_in_a_recorded_log(golden: Path, tmp_path: Path) -> None:
    found = Replayer.of_file(restore(read_rows(golden), tmp_path / "log.db")).what_if(parse_inputs(""))
    assert found.plans > 0
    assert (found.differing, found.differences, found.model.waf_flop) == (0, [], 0.0)
    assert (found.model.worker_s, found.model.money) == (found.measured.worker_s, found.measured.money)
    assert found.measured.worker_s > 0.0


def test_plans_of_another_decider_are_compared_with_what_is_decided_now(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another decider answered says nothing about the inputs: the recorded ones are decided again too."""
    monkeypatch.setattr(what_if, "DECIDER", DECIDER + 1)
    found = asked(world, "")
    assert (found.differing, found.decided_anew) == (0, found.plans)
    assert asked(world, "tasks: {b: {weight: 2}}").differing > 0


def test_a_weight_moves_workers(world: World) -> None:
    found = asked(world, "tasks: {b: {weight: 2}}")
    by_position = {record.position: record for record in world.records}
    changed = [difference for difference in found.differences if difference.workers]
    assert changed
    for difference in changed:
        plan = by_position[difference.position].event
        assert isinstance(plan, PlanDecided)
        assert (difference.plan, difference.trigger) == (plan.plan, plan.trigger)
        assert difference.what_if["b"] > difference.recorded["b"]
        # The other plan is the best one by the model with the changed weight.
        assert difference.what_if_waf_flop_per_s > difference.recorded_waf_flop_per_s
    a, b = found.tasks
    assert (a.task, b.task) == ("a", "b")
    assert b.what_if_worker_s > b.recorded_worker_s
    assert a.what_if_worker_s < a.recorded_worker_s
    gains = sum((d.what_if_waf_flop_per_s - d.recorded_waf_flop_per_s) * d.seconds for d in found.differences)
    assert found.model.waf_flop == pytest.approx(gains)
    assert found.model.waf_flop > 0.0
    causes = [
        by_position[at].recorded_at for at, each in sorted(by_position.items()) if isinstance(each.event, PlanDecided)
    ]
    whole = (world.records[-1].recorded_at - causes[0]).total_seconds()
    assert found.seconds == pytest.approx(whole, abs=0.1)  # a plan is recorded right behind its cause
    assert found.differing_s == pytest.approx(sum(difference.seconds for difference in found.differences))
    assert 0.0 < found.differing_s <= found.seconds


def test_worker_seconds_and_money_are_those_of_an_independent_count(world: World) -> None:
    """By the recorded plans' own members, between the times of their causes."""
    found = asked(world, "settings: {price_per_worker_hour: 1}")
    state_s: dict[str, float] = {}
    money = 0.0
    price = 2.0
    replayer = Replayer(world.records)
    for record, following in zip(world.records, world.records[1:], strict=False):
        if isinstance(record.event, ClusterConfigured):
            price = record.event.price_per_worker_hour
        seconds = (following.recorded_at - record.recorded_at).total_seconds()
        # A plan counts from its cause on; a cause has its plan in its state.
        for task in replayer.state_at(record.position).tasks.values():
            state_s[task.name] = state_s.get(task.name, 0.0) + len(task.members) * seconds
            money += len(task.members) * seconds * price / 3600
    assert {task.task: task.recorded_worker_s for task in found.tasks} == pytest.approx(state_s)
    assert found.measured.money == pytest.approx(money)
    assert found.model.money == pytest.approx(sum(state_s.values()) / 3600)


def test_a_price_alone_changes_only_money(world: World) -> None:
    found, before = asked(world, "settings: {price_per_worker_hour: 0.5}"), asked(world, "")
    assert found.model.money < before.model.money
    unpriced = {"model": {"money"}}
    assert found.model_dump(exclude=unpriced) == before.model_dump(exclude=unpriced)


def test_limits_of_a_task_bind(world: World) -> None:
    found = asked(world, "tasks: {a: {workers: {max: 1}}}")
    assert {d.what_if.get("a", 0) for d in found.differences if d.recorded.get("a")} <= {1}
    assert max(d.recorded.get("a", 0) for d in found.differences) > 1
    # Below its minimum a task does not run: the recorded plans are worth less by the model with that minimum.
    found = asked(world, "tasks: {b: {workers: {min: 9}}}")
    shared = [d for d in found.differences if 0 < d.recorded.get("b", 0) < 9]
    assert shared
    assert all(d.what_if.get("b", 0) in {0} | set(range(9, 13)) for d in shared)
    limited = World()
    limited.join("n0", 4)
    limited.submit("a", workers={"max": 2})
    (freed,) = asked(limited, "tasks: {a: {workers: {max: null}}}").differences
    assert (freed.recorded, freed.what_if) == ({"a": 2}, {"a": 4})
    # Nor does it count where the task has that number of workers already.
    limited.join("n1", 2)
    for below, most in zip(
        asked(limited, "tasks: {a: {workers: {min: 3, max: null}}}").differences, (4, 6), strict=True
    ):
        assert (below.recorded, below.what_if) == ({"a": 2}, {"a": most})
        assert below.recorded_waf_flop_per_s == 0.0 < below.what_if_waf_flop_per_s


def test_a_restart_does_not_end_the_comparison() -> None:
    """Its plan keeps the number of workers, whatever that is."""
    world = World()
    world.join("n0", 4)
    world.complete(world.submit("a", workers={"max": 2}))
    began = world.now
    for _ in range(2):
        world.wait(50.0)
        world.complete(world.exit(world.task("a").members[0]))
    world.wait(49.0)
    world.progress("a", step=9, step_s=0.1)
    seconds = (world.now - began).total_seconds()
    assert seconds > 149.0
    found = asked(world, "tasks: {a: {workers: {max: null}}}")
    (difference,) = found.differences
    assert (difference.recorded, difference.what_if) == ({"a": 2}, {"a": 4})
    assert difference.seconds >= seconds
    (task,) = found.tasks
    assert task.what_if_worker_s == pytest.approx(2 * task.recorded_worker_s)
    # The next time that a distribution is sought, the other number is that of its answer.
    world.join("n1", 4)
    world.wait(10.0)
    world.progress("a", step=19, step_s=0.1)
    more = asked(world, "tasks: {a: {workers: {max: null}}}")
    assert [one.what_if for one in more.differences] == [{"a": 4}, {"a": 8}]
    assert more.differences[0].seconds == pytest.approx(difference.seconds, abs=5.0)


def test_a_setting_counts_in_the_fold_and_in_the_decision() -> None:
    """A waiting heavy task displaces a running one once pausing is allowed."""
    world = World()
    world.join("n0")
    world.complete(world.submit("light", workers={"min": 2}))
    world.submit("heavy", weight=5.0, workers={"min": 2})
    (difference,) = asked(world, "settings: {allow_pausing: true}").differences
    assert (difference.recorded, difference.what_if) == ({"light": 2}, {"heavy": 2})


def test_consequences_stay_as_recorded(world: World) -> None:
    """A plan decided in place of another one is not folded: each plan is compared on its own."""
    found = asked(world, "tasks: {b: {weight: 2}}")
    replayer = Replayer(world.records)
    assert len(found.differences) > 1
    for difference in found.differences:
        tasks = replayer.state_at(difference.position).tasks.values()
        assert difference.recorded == {task.name: len(task.members) for task in tasks if task.members}
        assert difference.seconds > 0.0


@settings(max_examples=examples(15), deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["join", "lose", "submit", "finish", "wait"]), max_size=12), st.floats(0.1, 10.0))
def test_any_history_without_changes_has_no_difference(steps: list[str], weight: float) -> None:
    world, nodes, tasks = World(), 0, 0
    for step in steps:
        running = [task.name for task in world.state.tasks.values() if task.life == "active"]
        usable = [node.name for node in world.state.nodes.values() if node.usable]
        if step == "join":
            world.join(f"n{nodes}")
            nodes += 1
        elif step == "submit":
            world.submit(f"t{tasks}", weight=weight)
            tasks += 1
        elif step == "lose" and usable:
            world.complete(world.lose(usable[0]))
        elif step == "finish" and running:
            world.finish(running[0])
        elif step == "wait":
            world.wait(10.0)
    found = asked(world, "")
    assert found.differing == 0
    assert found.model.worker_s == found.measured.worker_s
    # The same weight again is no other decision.
    same = asked(world, json.dumps({"tasks": {f"t{i}": {"weight": weight} for i in range(tasks)}}))
    assert (same.differing, same.model) == (0, found.model)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tasks: {a: {wieght: 2}}", "tasks.a.wieght: unknown field; allowed: weight, workers"),
        ("tasks: {a: {workers: {least: 2}}}", "tasks.a.workers.least: unknown field; allowed: min, max"),
        ("price: 2", "price: unknown field; allowed: tasks, settings"),
        ("settings: {price: 2}", "settings.price: unknown field; allowed: mtbf_node_s, throughput_hysteresis"),
        ("settings: {throughput_hysteresis: 1.5}", "settings.throughput_hysteresis: Input should be less than 1"),
        ("tasks: {a: {weight: 0}}", "tasks.a.weight: Input should be greater than 0"),
        ("[1]", "a mapping of tasks, settings, not list"),
        ("tasks: [", "not YAML"),
        ("x" * ((1 << 20) + 1), "at most"),
        ("tasks: {c: {weight: 2}}", "tasks.c: the log has no such task; it has: a, b"),
        ("tasks: {a: {workers: {min: 5, max: 4}}}", "workers.min: 5 must not exceed workers.max, 4"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(world: World, text: str, said: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        asked(world, text)
    assert said in raised.value.detail


def test_every_setting_that_decisions_use_can_be_changed() -> None:
    identity = {"event_id", "occurred_at", "schema_version", "type", "currency", "policy"}
    assert set(SettingsInput.model_fields) == set(ClusterConfigured.model_fields) - identity
    for name, field in SettingsInput.model_fields.items():
        assert field.metadata == Settings.model_fields[name].metadata


@pytest.fixture
def log(world: World, tmp_path: Path) -> str:
    times = iter([record.recorded_at for record in world.records])
    written = EventLog(f"sqlite:///{tmp_path / 'log.db'}", clock=lambda: next(times))
    for record in world.records:
        written.append([record.event])
    written.close()
    return str(tmp_path / "log.db")


def run(log: str, text: str, *options: str) -> Result:
    file = Path(log).with_name("what-if.yaml")
    file.write_text(text)
    app = typer.Typer()
    app.command()(replay)
    return CliRunner().invoke(app, [log, "--what-if", str(file), *options])


def test_the_command_prints_tables_and_json(log: str, world: World) -> None:
    text = "tasks: {b: {weight: 2}}\nsettings: {price_per_worker_hour: 3}"
    expected: dict[str, Any] = asked(world, text).model_dump(mode="json")
    result = run(log, text, "-o", "json")
    assert (result.exit_code, json.loads(result.output)) == (0, expected)
    assert set(expected) >= {"measured", "model", "assumptions"}
    printed = run(log, text).output
    assert f"{expected['plans']} plans, in place of {expected['differing']} of them another one is decided" in printed
    assert "MEASURED" in printed
    assert "MODEL" in printed
    assert "causes and consequences stay as recorded" in printed
    first = next(d for d in expected["differences"] if d["workers"])
    for task, count in first["what_if"].items():
        before = first["recorded"].get(task, 0)
        assert (f"{task} {count}" if before == count else f"{task} {before} -> {count}") in printed
    assert isinstance(run(log, "", "--verify").exception, InvalidInput)
    assert isinstance(run(log, "bad: 1").exception, InvalidInput)
