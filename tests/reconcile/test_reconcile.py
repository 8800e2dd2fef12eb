"""Nothing waits for ever and nothing is done twice, whatever is lost, repeated or overtaken on the way.

The real cores of agents, detector, planner and transition service are connected by a network that is modelled, in
simulated time (``simulation.py``). Faults strike and the network fails for some time; then the network is healthy, and
within a limit every task must train, have ended, or wait for capacity, with no plan outstanding. That no generation is
configured with two memberships, and no process started twice for one plan, is checked in ``nodes.py``.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.reconcile.simulation import Kind, ScheduledFault, Script, Simulation, courses
from tests.reconcile.virtual import run

KINDS: list[Kind] = [
    "exit",
    "exit",
    "vanish",
    "hang",
    "silence",
    "agent",
    "restart",
    "restart",
    "detector",
    "planner",
    "transition",
    "stop",
    "kill",
    "finish",
]

FAULTS = st.builds(
    ScheduledFault,
    at_s=st.integers(0, 150).map(lambda tenths: tenths / 10),
    kind=st.sampled_from(KINDS),
    which=st.integers(0, 5),
    lasts_s=st.sampled_from([0.3, 1.0, 2.0, 4.0]),
)

SCRIPTS = st.builds(
    Script,
    seed=st.integers(0, 2**16),
    loss=st.sampled_from([0.0, 0.05, 0.2]),
    repeat=st.sampled_from([0.0, 0.1, 0.5]),
    delay_s=st.sampled_from([0.0, 0.05, 0.5]),
    faults=st.lists(FAULTS, max_size=6),
)


LEFT_BY_A_RELEASE = Script(
    seed=148,
    loss=0.2,
    repeat=0.5,
    delay_s=0.5,
    faults=[
        ScheduledFault(0.9, "finish", 3),
        ScheduledFault(7.2, "silence", 0),
        ScheduledFault(12.7, "finish", 0),
        ScheduledFault(13.6, "finish", 4),
        ScheduledFault(10.6, "agent", 3, 0.3),
        ScheduledFault(9.6, "agent", 5, 2.0),
    ],
)
"""A task ended, and kept a process on a node that had returned meanwhile."""

LEFT_ON_AN_ISOLATED_NODE = Script(
    seed=218,
    loss=0.05,
    faults=[
        ScheduledFault(8.9, "agent", 1, 0.3),
        ScheduledFault(12.8, "agent", 3),
        ScheduledFault(9.0, "agent", 4),
        ScheduledFault(6.0, "finish", 4),
        ScheduledFault(11.8, "hang", 5),
        ScheduledFault(12.2, "planner", 1),
    ],
)
"""A rank that hung stayed for ever on its node, to which the transition service sends nothing any more."""

VANISHED_DURING_A_PLAN = Script(
    seed=1124,
    repeat=0.1,
    delay_s=0.5,
    faults=[
        ScheduledFault(9.8, "hang", 5),
        ScheduledFault(2.0, "hang", 0),
        ScheduledFault(4.6, "exit", 2),
        ScheduledFault(10.7, "vanish", 1),
        ScheduledFault(10.5, "silence", 4, 4.0),
        ScheduledFault(10.9, "silence", 5, 0.3),
    ],
)
"""A healthy node was isolated for a survivor that had vanished before the plan."""


async def unsettled(script: Script) -> str:
    return await Simulation(script).run()


@pytest.mark.timeout(240)
@courses(30)
@given(script=SCRIPTS)
@example(script=LEFT_BY_A_RELEASE)
@example(script=LEFT_ON_AN_ISOLATED_NODE)
@example(script=VANISHED_DURING_A_PLAN)
def test_everything_settles(script: Script) -> None:
    assert run(unsettled(script)) == ""


@pytest.mark.parametrize("seed", range(2))
def test_without_faults_there_is_no_incident(seed: int) -> None:
    async def errors() -> list[str]:
        simulation = Simulation(Script(seed))
        assert await simulation.run() == ""
        return [r.event.type for r in simulation.log.records if r.event.type == "error.detected"]

    assert run(errors()) == []


@pytest.mark.parametrize("seed", range(4))
def test_agents_that_are_followed_at_once_cost_nothing(seed: int) -> None:
    """Their nodes are adopted: no incident, and every rank stays, whatever is lost or overtaken."""

    async def events() -> list[str]:
        faults = [ScheduledFault(2.0 + 0.7 * number, "restart", number, 0.3) for number in range(12)]
        simulation = Simulation(Script(seed, repeat=0.5, delay_s=0.05, faults=faults))
        assert await simulation.run() == ""
        return [r.event.type for r in simulation.log.records]

    found = run(events())
    assert "error.detected" not in found
    assert found.count("node.adopted") == 12
