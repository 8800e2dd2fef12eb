"""Anomalies of a task's numbers: loss spikes, slower steps after a transition, slow links; each in the log once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.detector.nodes.probing import ProbeQuestion
from services.detector.state import regressions
from services.detector.state.loss_spikes import LossWindow, Spike
from services.detector.state.regressions import TaskRates
from services.detector.state.slow_links import PERIOD_S, RoundTrips
from shared.events.plans import Layout, TaskChange
from shared.events.union import AnomalyObserved
from shared.messages.probes import Outcome, ProbeTarget
from shared.messages.signals import StepReport
from tests.agent.kit import stage
from tests.detector.kit import Cluster, at, moved, plan
from tests.examples import examples


def spikes(losses: list[float]) -> list[Spike]:
    window, expected, found = LossWindow(), None, []
    for step, loss in enumerate(losses, 1):
        spike = window.take(step, loss, expected)
        if spike is not None:
            found.append(spike)
            expected = None if spike.ended else spike.expected
    return found


def training(steps: int, seed: int = 1, noise: float = 0.02) -> list[float]:
    draw = random.Random(seed)
    return [2.0 + 3.0 * 0.99**step + draw.gauss(0.0, noise) for step in range(steps)]


def test_a_spike_is_found_at_its_step_once_and_ends_when_the_loss_is_back() -> None:
    losses = training(300)
    losses[200:205] = [9.0, 8.0, 7.0, 6.0, 5.0]
    began, over = spikes(losses)
    assert (began.step, began.loss, began.ended) == (201, 9.0, False)
    assert (over.step, over.ended) == (206, True)
    assert began.deviations > 8


@given(seed=st.integers(0, 2**32 - 1), noise=st.floats(0.0, 0.1), scale=st.sampled_from([1e-3, 1.0, 40.0]))
@settings(max_examples=examples(15), deadline=None)
def test_ordinary_training_has_no_spikes(seed: int, noise: float, scale: float) -> None:
    assert spikes([scale * loss for loss in training(1000, seed, noise)]) == []


@pytest.mark.parametrize(
    ("rises", "step"),
    [([0.3], None), ([0.5], 201), ([0.3, 0.3], 202), ([0.3, 0.0, 0.3], None), ([0.3, 0.5], 202)],
    ids=["a hard batch", "far above", "two in succession", "two apart", "worse at once"],
)
def test_one_hard_batch_is_no_spike(rises: list[float], step: int | None) -> None:
    """The scale is 0.02 of the loss at least: 0.3 are at most 15 deviations, and 0.5 at most 25."""
    losses = [*[2.0] * 200, *(2.0 * (1.0 + rise) for rise in rises), *[2.0] * 20]
    found = spikes(losses)
    assert [spike.step for spike in found if not spike.ended] == ([] if step is None else [step])


def test_a_spike_is_found_at_once_while_the_loss_falls_fast() -> None:
    """The first 35 losses of a small model: their scale is 0.7, and the spike is 12 deviations above their median."""
    losses = [2.5 + 3.0 * 0.96**step for step in range(35)]
    (spike, *_) = spikes([*losses, 4.0 * losses[-1], *[losses[-1]] * 5])
    assert spike.step == 36
    assert spike.deviations < 16.0


def test_a_new_level_is_no_spike_for_ever() -> None:
    began, over = spikes([*training(200), *[8.0] * 300])
    assert (began.step, over.step) == (201, 264)


def test_steps_that_are_done_again_are_not_judged_again() -> None:
    losses, window = training(100), LossWindow()
    for step, loss in enumerate(losses, 1):
        window.take(step, loss, None)
    assert window.take(50, 100.0, None) is None
    assert window.take(101, 100.0, None) is not None


def observed(events: list[Any]) -> list[AnomalyObserved]:
    return [event for event in events if isinstance(event, AnomalyObserved)]


def test_a_loss_spike_is_in_the_log_once_whatever_heartbeats_repeat_it() -> None:
    cluster, found = Cluster(3), []
    losses = training(60)
    losses[40] = 50.0
    for step in range(1, 61):
        repeated = range(max(1, step - 3), step + 1)
        reports = [StepReport(number, None, None, 0.5, losses[number - 1]) for number in repeated]
        found += cluster.beat("n0", step / 4, step=step, steps=reports).events
    began, over = observed(found)
    assert (began.kind, began.step, began.value, began.ended) == ("loss-spike", 41, 50.0, False)
    assert (over.step, over.ended) == (42, True)
    assert cluster.monitor.state.tasks["gpt"].anomalies == {}


LAYOUT = Layout(tensor=1, pipeline=1, data=2, micro_batch=1)


def test_only_the_generation_before_with_the_same_layout_is_compared_with() -> None:
    rates = TaskRates()
    for generation, step_s in ((1, 1.0), (1, 1.1), (2, 2.0)):
        rates.note(LAYOUT if generation == 1 else LAYOUT.model_copy(update={"data": 1}), generation, step_s)
    assert rates.before(LAYOUT, 3) == [1.0, 1.1]
    rates.note(LAYOUT, 3, 1.5)
    assert rates.before(LAYOUT, 3) == [1.0, 1.1]
    assert rates.before(LAYOUT, 4) == [1.5]
    for generation in range(4, 4 + 2 * regressions.LAYOUTS):
        rates.note(LAYOUT.model_copy(update={"data": generation}), generation, 1.0)
    assert len(rates.by_layout) == regressions.LAYOUTS


@given(seed=st.integers(0, 2**32 - 1), sigma=st.floats(0.0, 0.3), outlier=st.floats(1.0, 100.0))
@settings(max_examples=examples(30), deadline=None)
def test_the_same_distribution_is_no_regression(seed: int, sigma: float, outlier: float) -> None:
    draw = random.Random(seed)
    steps = [draw.lognormvariate(0.0, sigma) for _ in range(3 * regressions.WINDOW)]
    steps[-1] *= outlier
    before = [sorted(steps[:32])[16], sorted(steps[32:64])[16]]
    assert regressions.judge(steps[64:], before, known=False) is None or sigma > 0.25


def test_slower_steps_after_a_transition_are_in_the_log_once_and_so_is_their_end() -> None:
    cluster, found = Cluster(1), []
    number = 0

    def train(steps: int, step_s: float) -> None:
        nonlocal number
        for timed in range(1, steps + 1):
            number += 1
            reports = [StepReport(number, None, None, step_s, 2.0)]
            status: dict[str, Any] = {"step": number, "step_s": step_s, "steps_timed": timed, "steps": reports}
            found.extend(cluster.beat("n0", number * 2.0, **status).events)

    train(60, 1.0)
    change = TaskChange(task="gpt", reason="moved", action="move", from_generation=1, target=stage(2, cluster.workers))
    cluster.fold(plan("p2", "moving", change), moved("p2", 2, "restored", complete=True, step=number))
    cluster.generation = 2
    train(80, 1.5)
    (began,) = observed(found)
    assert (began.kind, began.generation, began.value, began.expected) == ("throughput-regression", 2, 1.5, 1.0)
    for timed in range(81, 140):
        number += 1
        reports = [StepReport(number, None, None, 1.0, 2.0)]
        status: dict[str, Any] = {"step": number, "step_s": 1.0, "steps_timed": timed, "steps": reports}
        found.extend(cluster.beat("n0", number * 2.0, **status).events)
    assert [event.ended for event in observed(found)] == [False, True]


@pytest.mark.parametrize(("slow_steps", "kinds"), [(250, []), (400, ["throughput-regression"])])
def test_short_steps_have_to_be_slower_for_longer_than_a_busy_machine_makes_them(
    slow_steps: int, kinds: list[str]
) -> None:
    """Steps of 0.05 s take 0.1 s after a transition: for 25 s, or 40 s."""
    cluster, found = Cluster(1), []
    number, at_s = 0, 0.0

    def train(steps: int, step_s: float) -> None:
        nonlocal number, at_s
        for timed in range(1, steps + 1):
            number, at_s = number + 1, at_s + step_s
            reports = [StepReport(number, None, None, step_s, 2.0)]
            status: dict[str, Any] = {"step": number, "step_s": step_s, "steps_timed": timed, "steps": reports}
            found.extend(cluster.beat("n0", at_s, **status).events)

    train(400, 0.05)
    change = TaskChange(task="gpt", reason="moved", action="move", from_generation=1, target=stage(2, cluster.workers))
    cluster.fold(plan("p2", "moving", change), moved("p2", 2, "restored", complete=True, step=number))
    cluster.generation = 2
    train(slow_steps, 0.1)
    assert [event.kind for event in observed(found)] == kinds


def probed(cluster: Cluster, one: str, found_s: dict[str, float], seconds: float) -> list[AnomalyObserved]:
    peers = {other: ProbeTarget(address="127.0.0.1:1", incarnation=f"first {other}") for other in found_s}
    question = ProbeQuestion(one, peers, at(seconds), 1.0)
    outcomes = dict.fromkeys(found_s, Outcome.REACHED)
    return observed(list(cluster.monitor.probed(question, outcomes, at(seconds), found_s).events))


def test_a_pair_with_long_round_trips_is_a_slow_link_until_they_are_short_again() -> None:
    cluster, found = Cluster(3), []
    for turn in range(12):
        slow_s = 0.02 if 3 <= turn < 8 else 0.0002
        found += probed(cluster, "n0", {"n1": slow_s, "n2": 0.0003}, 60.0 * turn)
        found += probed(cluster, "n1", {"n2": 0.0003}, 60.0 * turn)
    began, over = found
    assert (began.kind, began.node, began.peer, began.value, began.ended) == ("slow-link", "n0", "n1", 0.02, False)
    assert began.detected_at == at(60.0 * 5)
    assert (over.node, over.peer, over.ended) == ("n0", "n1", True)


def test_a_node_that_is_far_from_all_has_no_slow_link_and_one_probe_says_nothing() -> None:
    cluster, found = Cluster(3), []
    for turn in range(12):
        found += probed(cluster, "n0", {"n1": 0.02, "n2": 0.02}, 60.0 * turn)
        found += probed(cluster, "n1", {"n2": 0.5 if turn == 6 else 0.0003}, 60.0 * turn)
    assert found == []


def test_rare_probes_are_spread_over_their_period_and_ask_each_near_pair_once() -> None:
    trips, nodes = RoundTrips(), ["a", "b", "c", "d"]
    asked = [trips.due("gpt", 1, nodes, tenth / 10) for tenth in range(round(10 * PERIOD_S) + 1)]
    assert max(map(len, asked)) == 1
    assert sorted(pair for pairs in asked for pair in pairs) == [("a", "b"), ("a", "d"), ("b", "c"), ("c", "d")]
    assert trips.due("gpt", 2, nodes, 10_000.0) == []
    assert len(trips.due("gpt", 2, nodes, 20_000.0)) == 4  # after a long pause
    assert RoundTrips().due("gpt", 1, ["a", "b"], 0.0) == []


def test_a_detector_that_starts_anew_ends_the_spike_that_the_log_has() -> None:
    cluster = Cluster(3)
    spike = AnomalyObserved(
        event_id="spike",
        occurred_at=at(0),
        task="gpt",
        kind="loss-spike",
        generation=1,
        step=7,
        value=9.0,
        expected=2.0,
        detected_at=at(0),
    )
    cluster.fold(spike)
    high, low = (
        cluster.beat("n0", seconds, step=step, steps=[StepReport(step, None, None, 0.5, loss)]).events
        for seconds, step, loss in ((1.0, 8, 8.0), (2.0, 9, 2.1))
    )
    assert observed(high) == []
    (over,) = observed(low)
    assert (over.kind, over.ended) == ("loss-spike", True)
