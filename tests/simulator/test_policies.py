"""The registry of policies, their parameters, and how they recover from the changes that real plans ask for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import pytest

from shared.errors import InvalidInput
from shared.events.plans import TaskChange
from shared.events.severities import SEVERITY, ErrorKind
from simulator.policies import POLICIES, SOLVES
from simulator.policies.parameters import COMMON, common, parameters, policies, value
from simulator.policies.restriction import solve_without_taking
from simulator.policies.timing import Detection, gap_s, state_source
from simulator.policy import Course, Recovery
from tests.planner.kit import World, spec

NAMES = [
    "megatron",
    "megatron-spares",
    "varuna",
    "bamboo",
    "oobleck",
    "recycle",
    "torchft",
    "byterobust",
    "unicron-paper",
    "unicron",
]

STEP_S = 20.0
STATE_BYTES = 10e9


def test_registry() -> None:
    assert list(POLICIES) == list(SOLVES) == NAMES
    for name, policy in POLICIES.items():
        assert policy.name == name
        assert SOLVES[name] is policy.solve
        assert (policy.solve is solve_without_taking) == (policy.scope != "cluster")
        assert 0.0 < policy.efficiency <= 1.0
        assert policy.source
        assert policy.assumptions
        assert policy.timing.checkpoint_every_s > 0.0
        assert policy.detects_slow != ("Nobody looks for slow workers." in policy.assumptions)


def test_every_parameter_has_a_source_and_is_used() -> None:
    texts = [path.read_text() for path in files("simulator.policies").iterdir() if path.name.endswith(".py")]
    for policy in policies():
        for name, parameter in parameters(policy).items():
            assert parameter.known in ("read", "recalled", "derived", "assumed")
            assert parameter.unit
            assert len(parameter.source) > 20
            use = f'common("{name}")' if policy == COMMON else f'"{name}"'
            assert any(use in text for text in texts), (policy, name)
    assert set(policies()) <= {COMMON, *NAMES}


@pytest.mark.parametrize(("policy", "name"), [("nobody", "queue_s"), ("megatron", "nothing")])
def test_unknown_parameters_are_named(policy: str, name: str) -> None:
    with pytest.raises(InvalidInput, match="unknown; known"):
        value(policy, name)


# ---- detection


def test_detection_by_kind() -> None:
    detection = Detection(node_s=1.0, process_s=2.0, exception_s=3.0, hang_s=4.0, hang_steps=2.0)
    found = {kind: detection.of(kind, STEP_S) for kind in ErrorKind}
    assert found[ErrorKind.NODE_LOST] == 1.0
    assert found[ErrorKind.PROCESS_EXIT] == found[ErrorKind.CONNECTION] == 2.0
    assert found[ErrorKind.EXCEPTION] == found[ErrorKind.DEVICE] == 3.0
    assert found[ErrorKind.HANG] == found[ErrorKind.COLLECTIVE_TIMEOUT] == found[ErrorKind.BROKEN_LINK] == 40.0
    assert detection.of(ErrorKind.HANG, 1.0) == 4.0


def test_hangs_by_times_without_progress() -> None:
    detection = Detection(1.0, 1.0, 1.0, hang_s=0.5, hang_steps=2.0, hang_gaps=3.0)
    assert gap_s(STEP_S, 4) == STEP_S / 4
    assert gap_s(STEP_S, 100) == STEP_S * common("reduction_steps")
    assert detection.of(ErrorKind.HANG, STEP_S, 4) == 3 * STEP_S / 4
    assert detection.of(ErrorKind.HANG, STEP_S, 1) == 2 * STEP_S
    assert detection.of(ErrorKind.HANG, 0.1, 100) == 0.5


def test_every_policy_finds_every_kind() -> None:
    for policy in POLICIES.values():
        for kind in SEVERITY:
            assert policy.timing.detection_s(kind, STEP_S, 8) > 0.0


def test_the_papers_times() -> None:
    paper, megatron = POLICIES["unicron-paper"].timing, POLICIES["megatron"].timing
    assert paper.detection_s(ErrorKind.NODE_LOST, STEP_S) == 5.6
    assert paper.detection_s(ErrorKind.PROCESS_EXIT, STEP_S) == 1.8
    assert paper.detection_s(ErrorKind.EXCEPTION, STEP_S) == 0.3
    assert paper.detection_s(ErrorKind.HANG, STEP_S, 100) == 3 * STEP_S
    assert megatron.detection_s(ErrorKind.PROCESS_EXIT, STEP_S) == 30 * 60.0


# ---- recoveries


@dataclass
class Cluster:
    """Two nodes of two workers, and a task on all of them."""

    world: World

    @classmethod
    def of(cls, **fields: Any) -> Cluster:
        world = World()
        world.join("n0")
        world.join("n1")
        world.complete(world.submit("a", **fields))
        assert len(world.task().members) == 4
        return cls(world)

    def node_lost(self) -> TaskChange:
        return self.world.lose("n1").changes[0]

    def exit(self) -> TaskChange:
        return self.world.exit(self.world.task().members[0]).changes[0]

    def returned(self) -> TaskChange:
        self.world.complete(self.world.lose("n1"))
        return self.world.join("n1").changes[0]


def course(name: str, change: TaskChange, kind: ErrorKind | None = None) -> Course:
    return POLICIES[name].timing.course(
        Recovery(
            spec=spec("a"),
            change=change,
            hardware="a100-80",
            step_s=STEP_S,
            state_bytes_per_worker=STATE_BYTES,
            affected=change.hold,
            severity=SEVERITY[kind] if kind else None,
            kind=kind,
        )
    )


def test_megatron_takes_68_minutes() -> None:
    """Figure 2: 30 to notice, 9 in the queue, 14 for the environment, and 15 of lost work on average."""
    timing = POLICIES["megatron"].timing
    found = course("megatron", Cluster.of().exit(), ErrorKind.PROCESS_EXIT)
    assert found.lost == "checkpoint"
    detection_s = timing.detection_s(ErrorKind.PROCESS_EXIT, STEP_S)
    assert detection_s + found.down_s + timing.checkpoint_every_s / 2 == 68 * 60.0


def test_live_replicas_go_on_while_a_process_starts() -> None:
    change = Cluster.of().exit()
    assert change.interrupted is not None
    for name in ("bamboo", "oobleck", "recycle", "torchft", "unicron-paper", "unicron"):
        found = course(name, change, ErrorKind.PROCESS_EXIT)
        timing = POLICIES[name].timing
        assert found.meanwhile * found.down_s == pytest.approx(timing.start_s)  # type: ignore[attr-defined]
        assert found.lost != "checkpoint"
    assert course("unicron", change, ErrorKind.PROCESS_EXIT).lost == "nothing"
    assert course("torchft", change, ErrorKind.PROCESS_EXIT).lost == "step"


def test_survivors_of_a_lost_node_wait_for_communicators_alone() -> None:
    change = Cluster.of().node_lost()
    assert state_source(change) == "live"
    assert course("recycle", change, ErrorKind.NODE_LOST) == Course(down_s=common("communicators_s"), lost="step")
    assert course("varuna", change, ErrorKind.NODE_LOST).lost == "checkpoint"
    assert course("varuna", change, ErrorKind.NODE_LOST).down_s == pytest.approx(120 + 46 + STATE_BYTES / 1e9)


def test_newcomers_start_while_the_others_train() -> None:
    change = Cluster.of().returned()
    assert not change.hold
    assert change.prepare
    found = course("unicron-paper", change)
    assert found.stop_s == common("process_start_s")
    assert found.down_s == pytest.approx(common("communicators_s") + STATE_BYTES / 25e9)
    assert found.lost == "nothing"


def test_state_that_no_live_worker_has() -> None:
    """Both nodes are lost, so no process of the task is left. It is paused, and begins anew with the next node."""
    world = Cluster.of().world
    world.complete(world.lose("n1"))
    plan = world.lose("n0")
    paused = plan.changes[0]
    assert paused.action == "pause"
    for name in NAMES:
        assert course(name, paused, ErrorKind.NODE_LOST).down_s == 0.0
    assert course("megatron", paused, ErrorKind.NODE_LOST).lost == "checkpoint"
    assert course("unicron", paused, ErrorKind.NODE_LOST).lost == "checkpoint"
    assert course("byterobust", paused, ErrorKind.NODE_LOST).lost == "step"
    world.complete(plan)
    begun = world.join("n2").changes[0]
    assert state_source(begun) in ("checkpoint", "saved")
    for name in NAMES:
        assert course(name, begun).down_s > 0.0
        assert course(name, begun).stop_s == 0.0


def test_byterobust_resolves_by_symptom() -> None:
    change = Cluster.of().exit()
    restart_s = common("process_start_s")
    assert course("byterobust", change, ErrorKind.EXCEPTION).down_s == 93.0 + restart_s
    assert course("byterobust", change, ErrorKind.NON_FINITE).down_s == 4289.0 + restart_s
