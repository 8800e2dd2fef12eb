"""The limits in force, as the detector answers for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.agent.agent import Agent
from services.detector.decisions import limits_in_force
from services.detector.state.arrivals import WARM_UP
from services.detector.state.progress_gaps import FIRST_STEPS
from shared.bus.connection import Bus
from shared.log.journal import Journal
from shared.messages.limits_in_force import LIMITS, LimitsRequest, NodeLimits
from shared.settings.model import Settings
from tests.agent.kit import WAIT_S
from tests.detector.conftest import patient, watching
from tests.detector.kit import Cluster, at, lose, moved


def shown(cluster: Cluster, seconds: float, *names: str) -> list[NodeLimits]:
    monitor = cluster.monitor
    return limits_in_force.of_nodes(monitor.state, monitor.limits.silence, names or cluster.names, at(seconds))


def train(cluster: Cluster, until_s: float, report: Callable[[int], dict[str, Any]]) -> None:
    for beat in range(1, round(until_s * 4) + 1):
        cluster.monitor.echo(at(beat / 4))
        for name in cluster.names:
            cluster.beat(name, beat / 4, step=beat, step_s=20.0, steps_timed=beat, **report(beat))


def test_a_node_shows_its_silence_and_the_limits_of_its_ranks() -> None:
    cluster = Cluster()
    train(cluster, 15.0, lambda _: {"gaps_s": {"compute": 1.5}})
    node = shown(cluster, 15.5)[1]
    assert (node.node, node.source, node.silence_s) == ("n1", "floor", 0.5)
    assert node.limit_s == pytest.approx(1.2)
    assert node.samples > WARM_UP
    assert node.longest_delay_s == 0.0
    assert node.phi > 10.0
    [rank] = node.ranks
    assert (rank.worker, rank.task, rank.rank, rank.phase) == ("n1/0", "gpt", 1, "compute")
    assert (rank.source, rank.limit_s, rank.quantile_s) == ("phase", 4.5, 1.5)


def test_how_late_heartbeats_come_is_not_known_before_the_second() -> None:
    [node] = shown(Cluster(1), 0.1)
    assert (node.samples, node.median_delay_s, node.longest_delay_s) == (0, None, None)


def test_until_enough_is_known_the_settings_are_in_force() -> None:
    cluster = Cluster()
    train(cluster, 1.0, lambda _: {})
    node = shown(cluster, 1.0)[0]
    assert (node.source, node.limit_s) == ("warm-up", 1.5)
    assert (node.ranks[0].source, node.ranks[0].limit_s) == ("mean", 60.0)
    assert FIRST_STEPS > 4


def test_a_task_shows_its_limits_by_what_its_ranks_do() -> None:
    cluster = Cluster(trained=False)
    [first] = limits_in_force.of_tasks(cluster.monitor.state, cluster.monitor.limits.silence, ["gpt", "other"])
    assert (first.step_s, first.first_steps_s, first.longest_start_s) == (None, 120.0, None)
    cluster.fold(moved("p1", 1, "restored", complete=True, durations_s={"first_step": 12.0}))
    train(cluster, 1.0, lambda _: {})
    [found] = limits_in_force.of_tasks(cluster.monitor.state, cluster.monitor.limits.silence, ["gpt"])
    assert (found.step_s, found.first_steps_s, found.longest_start_s) == (60.0, 60.0, 12.0)
    assert (found.between_steps_s, found.hard_s) == (120.0, 240.0)
    cluster.beat("n1", 2.0, step=9, phase="ended")
    [found] = limits_in_force.of_tasks(cluster.monitor.state, cluster.monitor.limits.silence, ["gpt"])
    assert found.step_s == 60.0, "where a rank is at the moment is another matter"


def test_nodes_that_are_lost_or_unknown_have_no_limits() -> None:
    cluster = Cluster()
    lose(cluster, "n2")
    assert [node.node for node in shown(cluster, 12.0, "n2", "n9", "n0")] == ["n0"]


async def test_the_detector_answers_and_its_metrics_have_the_same(
    settings: Settings, bus: Bus, journal: Journal, agent: Agent
) -> None:
    registry = CollectorRegistry()
    request = LimitsRequest(nodes=["n0"]).model_dump_json().encode()
    async with watching(patient(settings), bus, journal, registry=registry) as watch:
        await watch.until(lambda events: any(event.type == "node.joined" for event in events))
        reply = LIMITS.reply.decode(await bus.request(LIMITS.subject, request, timeout_s=WAIT_S))
        assert [(node.node, node.source, node.limit_s) for node in reply.nodes] == [("n0", "warm-up", WAIT_S)]
        assert registry.get_sample_value("unicron_silence_limit_seconds", {"node": "n0"}) == WAIT_S
        unread = LIMITS.reply.decode(await bus.request(LIMITS.subject, b"{", timeout_s=WAIT_S))
        assert unread.nodes == []
