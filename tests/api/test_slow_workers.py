"""Slow workers: the list of their slowdowns, and the post-mortem of each."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.api.postmortem import page
from services.api.postmortem.model import SlowWorkerPostMortem
from services.api.postmortem.slow import Pace, cost, known_slowdown, slow_post_mortem
from services.api.postmortem.slow_course import Outcome, time_of_step
from services.api.store.tables import SLOWDOWNS
from shared.bus.connection import Bus
from shared.events.union import PlanDecided, StateMoved, WorkerSlowed
from shared.log.journal import Journal
from shared.settings.model import Settings
from shared.views.documents import ClusterView
from shared.views.observed_views import SlowdownView
from tests.api.kit import serving
from tests.api.pages import ParsedPage, history
from tests.api.test_observed import NOW, History
from tests.logs.kit import forge, golden_log, read_rows, restore

SLOW = golden_log("slow-worker")
"""A slow worker is found, left out by one plan, and as fast again later, which another plan answers."""

PRICE = 3.6


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log, as if the detector had found its first slow worker by the steps that were reported before.

    In the log somebody has told it so.
    """
    rows = read_rows(SLOW)
    found = next(row["event_id"] for row in rows if row["type"] == "worker.slowed")
    done: list[int] = []

    def find(event: dict[str, Any]) -> None:
        if event["type"] == "task.progressed" and event["task"] == "held-up":
            done.append(event["step"])
        if event["event_id"] == found:
            steps = done[-1] - done[0]
            evidence = {"measured": 1.3594, "peers": 2, "spread": 0.1, "steps": steps}
            event |= {"slowdown": 1.331, "rank": 0, "step": done[-1], "evidence": evidence}

    path = tmp_path_factory.mktemp("measured") / "slow-worker.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in forge(rows, find)))
    return path


@pytest.fixture(scope="module")
def made(measured: Path, tmp_path_factory: pytest.TempPathFactory) -> SlowWorkerPostMortem:
    with history(measured, tmp_path_factory.mktemp("slow")) as (log, store, records):
        with store.reading() as views:
            view, _ = views.page(SLOWDOWNS)
            found = known_slowdown(views, view.id)
        return slow_post_mortem(found, log, ClusterView(price_per_worker_hour=PRICE), records[-1].recorded_at)


def test_every_question_is_answered_on_the_page(made: SlowWorkerPostMortem, measured: Path, tmp_path: Path) -> None:
    with history(measured, tmp_path) as (_, _, records):
        slowed = next(r for r in records if isinstance(r.event, WorkerSlowed))
        plans = [r for r in records if isinstance(r.event, PlanDecided) and r.event.plan in made.slow.plans]
        moves = [r for r in records if isinstance(r.event, StateMoved) and r.event.plan in made.slow.plans]
    assert isinstance(slowed.event, WorkerSlowed)
    steps = slowed.event.evidence["steps"]
    parsed = ParsedPage()
    parsed.feed(page.html(made))
    assert (parsed.open, parsed.loads) == ([], [])
    sections = parsed.sections
    assert "it is as fast as its peers again" in sections["short"]
    assert "no step was computed again" in sections["short"]
    for text in (made.slow.id, "n0/0 on n0, rank 0 of held-up", f"about, by the reports of progress: {steps} steps"):
        assert text in sections["failed"]
    assert re.search(rf"once {steps} steps had spoken against it: \d+\.\d\d s after it began", sections["found"])
    assert "1.36 times the median of 2 peers" in sections["found"]
    for record in (slowed, *plans, *moves):
        assert f"{record.position}" in sections["course"]
    assert "left out, and others take their places (spare)" in sections["decided"]
    assert "Why not fewer or more workers" in sections["decided"]
    assert "took it from a member that still had it" in sections["state"]
    for phase in ("detection", "decision", "transition", "all of it"):
        assert phase in sections["phases"]
    assert made.cost is not None
    assert f"{made.cost.worker_s:.1f}" in sections["cost"]
    assert "each further hour would have cost" in sections["cost"]
    assert "No worker of n0 was slow before" in sections["before"]
    assert '"peers": 2' in sections["evidence"]
    assert f"log position {slowed.position}" in sections["evidence"]
    for text in (made.headline, *made.standing, made.found):
        assert text.replace("_", "\\_") in page.markdown(made)


def test_phases_add_up(made: SlowWorkerPostMortem) -> None:
    *parts, whole = made.phases
    assert whole.duration_s == pytest.approx(sum(part.duration_s or 0.0 for part in parts))


def slowdown(**changes: object) -> SlowdownView:
    about = {
        "id": "s",
        "position": 1,
        "worker": "n1/0",
        "node": "n1",
        "task": "gpt",
        "generation": 1,
        "rank": 1,
        "step": 20,
        "slowdown": 2.0,
        "worst": 2.0,
        "found_at": NOW,
    }
    return SlowdownView.model_validate(about | changes)


def test_what_a_slow_worker_costs_is_added_up() -> None:
    began, decided = NOW - timedelta(seconds=10), NOW + timedelta(seconds=2)
    done, now = decided + timedelta(seconds=3), decided + timedelta(seconds=103)
    steps = Pace(before_s=1.0, slow_s=1.25)  # a fifth of the time is lost
    out = cost(slowdown(), 4, steps, began, Outcome("spare", "", decided), done, PRICE, now)
    parts = (out.waited_worker_s, out.paused_worker_s, out.unused_worker_s)
    assert parts == pytest.approx((4 * 12 * 0.2, 4 * 3, 100))
    assert out.money == pytest.approx(sum(parts) * PRICE / 3600)
    assert out.further_hour_worker_s == pytest.approx(4 * 3600 * 0.2)
    kept = cost(slowdown(), 4, steps, began, Outcome("keep", "gpt", None), done, PRICE, now)
    assert (kept.waited_worker_s, kept.paused_worker_s, kept.unused_worker_s) == pytest.approx((4 * 115 * 0.2, 0, 0))
    over = slowdown(ended_at=NOW + timedelta(seconds=10))
    assert cost(over, 4, steps, began, Outcome(None, "gpt", None), None, PRICE, now).waited_worker_s == pytest.approx(
        4 * 20 * 0.2
    )


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0.1, 60)), min_size=1, max_size=8), st.integers(0, 400))
def test_the_time_of_a_step_lies_between_those_around_it(parts: list[tuple[int, float]], step: int) -> None:
    at, done, reports = datetime(2026, 1, 1, tzinfo=UTC), 0, list[tuple[int, datetime]]()
    for steps, seconds in parts:
        done, at = done + steps, at + timedelta(seconds=seconds)
        reports.append((done, at))
    found = time_of_step(reports, step)
    around = [(first, last) for first, last in pairwise(reports) if first[0] < last[0]]
    inside = [pair for pair in around if pair[0][0] <= step <= pair[1][0]]
    assert (found is not None) == bool(inside)
    if found is not None:
        (_, start), (_, end) = inside[0]
        assert start <= found <= end


def test_a_slowdown_is_one_until_it_is_over() -> None:
    h = History()
    h.slow(1.3, 40)
    (first,) = h.views.slowdowns
    h.slow(2.0, 80)
    h.slow(1.5, 120)
    view = h.views.slowdowns[first]
    assert (view.slowdown, view.worst, view.step, view.ended_at) == (1.5, 2.0, 40, None)
    h.slow(1.0, 160)
    assert h.views.slowdowns[first].ended == "it is as fast as its peers again"
    h.slow(1.4, 200)
    (second,) = h.views.slowdowns.keys() - {first}
    h.join("n1", "second")
    assert h.views.slowdowns[second].ended == "the node joined anew"
    assert h.views.slowdowns[second].ended_at == NOW


async def test_slow_workers_are_listed_and_have_pages_in_three_forms(
    settings: Settings, bus: Bus, journal: Journal
) -> None:
    restore(read_rows(SLOW), settings.run_dir / "log.db")
    async with serving(settings, bus, journal) as server:
        http = server.http
        found = await http.get("/v1/slow-workers", params={"task": "held-up", "state": "closed"})
        listed = found.json()["items"][0]
        assert (listed["worker"], listed["worst"], listed["ended"]) == ("n0/0", 2.0, "it is as fast as its peers again")
        assert (await http.get("/v1/slow-workers", params={"state": "open"})).json()["items"] == []
        assert (await http.get("/v1/slow-workers", params={"until": listed["found_at"]})).json()["items"] == []
        path = f"/v1/slow-workers/{listed['id']}"
        shown = await http.get(path)
        assert shown.json() == listed
        assert (await http.get(path, headers={"If-None-Match": shown.headers["etag"]})).status_code == 304
        assert (await http.get(f"{path}/postmortem")).json()["slow"] == listed
        as_html = await http.get(f"{path}/postmortem", params={"format": "html"})
        assert as_html.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
        as_text = await http.get(f"{path}/postmortem", params={"format": "md"})
        assert as_text.text.startswith("# n0/0 of held-up was 2 times as slow")
        missing = await http.get("/v1/slow-workers/no-such/postmortem")
        assert (missing.status_code, missing.json()["detail"]) == (404, "no slow worker 'no-such'")
        ids = (await http.get("/v1/ids", params={"kind": "slow-worker", "prefix": listed["id"][:4]})).json()
        assert ids["ids"] == [listed["id"]]
