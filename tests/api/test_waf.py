"""WAF over time: what the tables add up equals what the views say, for every window."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.api.gateway import Gateway
from services.api.live import LiveState, LiveTask
from services.api.routers.waf import waf_history
from services.api.store.projection_store import Store
from shared.costs.service_levels import achieved_flop, healthy_flop
from shared.costs.span_claims import Window
from shared.interface.costs import WafHistory
from shared.views.documents import Views
from tests.api.kit import START, Story, client_of, offline_gateway
from tests.api.test_ledger import ALL, lose_n1, solution
from tests.examples import examples

END_S = 260.0
"""The story's present."""


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Story, Gateway]]:
    """A task loses a node and goes on with half of its workers; the healthy line changes twice."""
    folder = tmp_path_factory.mktemp("waf")
    story = Story(folder / "story.db")
    story.running()
    story.at(25).plan("p0", solution=solution(gpt=100.0))
    story.at(95).progress("gpt", 90, 1.0)
    lose_n1(story, ALL[:2], solution=solution(gpt=60.0))
    story.at(200).progress("gpt", 103, 1.0, generation=3)
    story.at(220).plan("p2", solution=solution(gpt=120.0))
    with offline_gateway(folder, story.records) as gateway:
        yield story, gateway
    story.log.close()


def history(
    past: tuple[Story, Gateway], start_s: float, end_s: float, points: int, live: LiveState | None = None
) -> WafHistory:
    story, gateway = past
    with gateway.store.reading() as views:
        return waf_history(
            views, story.time(start_s), story.time(end_s), points, story.time(END_S), live or LiveState()
        )


def expected(views: Views, start_s: float, end_s: float) -> tuple[float, float]:
    """Return both rates of one window by the definitions of the service levels."""
    window = Window(START.timestamp() + start_s, START.timestamp() + end_s)
    spans, now_s = list(views.spans.values()), START.timestamp() + END_S
    length = window.end_s - window.start_s
    return achieved_flop(spans, views.tasks, window, now_s) / length, healthy_flop(spans, window) / length


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start_s=st.integers(-100, 250),
    length_s=st.floats(0.1, 400, allow_nan=False),
    points=st.integers(1, 60),
)
def test_each_point_is_the_mean_of_its_time(
    past: tuple[Story, Gateway], start_s: int, length_s: float, points: int
) -> None:
    found = history(past, start_s, start_s + length_s, points)
    views = past[0].views()
    end_s = min(start_s + length_s, END_S)
    assert found.window_end == past[0].time(start_s) + timedelta(seconds=end_s - start_s)
    assert found.point_s == pytest.approx((end_s - start_s) / points, rel=1e-4)
    for index in range(points):
        begin = start_s + index * (end_s - start_s) / points
        done, possible = expected(views, begin, begin + (end_s - start_s) / points)
        # Times are in seconds since the epoch, of which float64 keeps 2e-7: a narrow point is known as exactly.
        near = max(1e-6, 1e-6 / found.point_s)
        assert found.healthy_flop_per_s[index] == pytest.approx(possible, rel=near, abs=near * 100.0)
        assert found.waf_flop_per_s[index] == pytest.approx(done, rel=near, abs=near * views.tasks["gpt"].update_flop)


def test_the_line_and_the_loss_can_be_seen(past: tuple[Story, Gateway]) -> None:
    found = history(past, 0, 250, 10)
    step = past[0].views().tasks["gpt"].update_flop
    assert found.healthy_flop_per_s[0] == 0.0  # no plan has said yet what is best
    assert found.healthy_flop_per_s[2:8] == pytest.approx([100.0] * 6)
    assert found.healthy_flop_per_s[9] == pytest.approx(120.0)
    assert found.waf_flop_per_s[2] > 5 * found.waf_flop_per_s[7] > 0.0
    assert found.waf_flop_per_s[7] == pytest.approx(10 * step / 150)  # 93 to 103, from 110 to the present


def test_steps_that_only_heartbeats_know_count(past: tuple[Story, Gateway]) -> None:
    step = past[0].views().tasks["gpt"].update_flop
    ahead = LiveState(tasks={"gpt": LiveTask(generation=3, step=123)})
    assert history(past, 240, 250, 1, ahead).waf_flop_per_s == [pytest.approx(30 * step / 150)]
    older = LiveState(tasks={"gpt": LiveTask(generation=1, step=123)})
    assert history(past, 240, 250, 1, older).waf_flop_per_s == [pytest.approx(10 * step / 150)]


def test_postgresql_adds_up_the_same(past: tuple[Story, Gateway], postgres_url: str) -> None:
    with contextlib.closing(Store(postgres_url)) as store:
        store.fold(past[0].records)
        with store.reading() as views:
            found = waf_history(views, past[0].time(0), past[0].time(250), 10, past[0].time(END_S), LiveState())
    same = history(past, 0, 250, 10)
    assert found.waf_flop_per_s == pytest.approx(same.waf_flop_per_s)
    assert found.healthy_flop_per_s == pytest.approx(same.healthy_flop_per_s)


def test_a_window_that_has_not_begun_has_no_points(past: tuple[Story, Gateway]) -> None:
    found = history(past, END_S, END_S + 10, 10)
    assert (found.waf_flop_per_s, found.healthy_flop_per_s) == ([], [])


def test_steps_that_no_summary_knew_before_a_fault_make_no_peak(tmp_path: Path) -> None:
    """The newest summary before the fault says step 11; the task trains again at step 91."""
    story = Story(tmp_path / "story.db")
    story.running().process_exit().process_restored()
    with offline_gateway(tmp_path, story.records) as gateway:
        found = history((story, gateway), 0, 120, 60)
    story.log.close()
    step = story.views().tasks["gpt"].update_flop  # one step takes a second
    assert sum(found.waf_flop_per_s) * found.point_s == pytest.approx(95 * step)
    assert found.waf_flop_per_s[20] == pytest.approx(90 * step / (101 - 10), rel=0.02)
    assert max(found.waf_flop_per_s) < 1.1 * step


async def test_requests_are_checked(tmp_path: Path) -> None:
    with offline_gateway(tmp_path) as gateway:
        async with client_of(gateway) as client:
            found = (await client.get("/v1/waf")).json()
            assert (len(found["waf_flop_per_s"]), found["point_s"]) == (240, 15.0)
            assert await refused(client, points=0) == "points"
            assert await refused(client, points=1001) == "points"
            assert await refused(client, **{"from": "2025-01-02T00:00:00Z", "to": "2025-01-01T00:00:00Z"}) == "to"
            assert await refused(client, to="0001-01-01T00:00:00Z") == "to"


async def refused(client: httpx.AsyncClient, **parameters: str | int) -> str:
    """Return the field because of which a request is refused."""
    answer = await client.get("/v1/waf", params=parameters)
    assert answer.status_code == 422
    field: str = answer.json()["errors"][0]["field"]
    return field
