"""Heartbeats of a busy and healthy cluster."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.events.union import ErrorDetected
from tests.detector.kit import START, Cluster, at

beats = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.floats(0.05, 0.9),  # what a node's next heartbeat takes: late on a busy machine, never lost
        st.sampled_from(["begun", "compute", "reduce", "update", "ended", "setup", "checkpoint", "waiting"]),
        st.floats(0.0, 2.9),
        st.floats(0.01, 5.0),
    ),
    max_size=120,
)


@given(beats)
def test_ordinary_heartbeats_in_any_interleaving_raise_no_error(
    beats: list[tuple[int, float, str, float, float]],
) -> None:
    cluster = Cluster()
    due = dict.fromkeys(cluster.names, 0.0)
    steps = dict.fromkeys(cluster.names, 0)
    now = 0.0
    for index, gap_s, phase, age_s, step_s in beats:
        target = now + gap_s / 3
        while now + 0.1 < target:
            now += 0.1
            assert not [e for e in cluster.tick(now) if isinstance(e, ErrorDetected)]
        now = target
        chosen = cluster.names[index]
        for node in cluster.names:
            if node == chosen or now - due[node] > 0.9:
                due[node] = now
                steps[node] += phase == "ended"
                status = {"phase": phase, "progress_age_s": age_s, "step": steps[node]}
                timed = {"step_s": step_s, "steps_timed": steps[node]}
                decision = cluster.beat(node, now, **status, **timed)
                assert not [e for e in decision.events if isinstance(e, ErrorDetected)]
        assert not [e for e in cluster.tick(now) if isinstance(e, ErrorDetected)]
    assert START <= at(now)
