"""The post-mortem of an incident answers an operator's questions, each from the log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.api.postmortem import page
from services.api.postmortem.counts import count_reasons, replanned, unused
from services.api.postmortem.gather import known, post_mortem
from services.api.postmortem.model import PostMortem
from services.api.store import Store
from services.api.tables import INCIDENTS
from services.api.views import ClusterView
from shared.errors import NotFound
from shared.events import PlanDecided, Recorded, StateMoved
from shared.log.log import EventLog
from shared.planning.solver import solve_with_alternatives
from shared.plans import Problem, TaskProblem
from shared.severities import ErrorKind
from tests.logs.kit import FOLDER, GOLDEN, read_rows, restore

DEMO = FOLDER / "demo-4.jsonl"
"""A log of the demo: a kill, an exception, a hang and a lost node."""


@contextmanager
def history(golden: Path, folder: Path) -> Iterator[tuple[EventLog, Store, list[Recorded]]]:
    """Give a golden log, the projections of it, and its records."""
    log = EventLog(f"sqlite:///{restore(read_rows(golden), folder / 'log.db')}", read_only=True)
    store = Store(f"sqlite:///{folder / 'projections.db'}")
    records = list(log.read_all())
    store.fold(records)
    try:
        yield log, store, records
    finally:
        store.close()
        log.close()


def post_mortems(golden: Path, folder: Path) -> Iterator[tuple[PostMortem, list[Recorded]]]:
    with history(golden, folder) as (log, store, records):
        now = records[-1].recorded_at + timedelta(seconds=1)
        with store.reading() as views:
            names = [view.id for view in views.page(INCIDENTS)]
        for name in names:
            with store.reading() as views:
                found = known(views, name, ClusterView(price_per_worker_hour=3.6), now)
            yield post_mortem(found, log, ClusterView(price_per_worker_hour=3.6), now), records


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[ErrorKind, tuple[PostMortem, list[Recorded]]]:
    found = post_mortems(DEMO, tmp_path_factory.mktemp("demo"))
    return {made.incident.kind: (made, records) for made, records in found}


KINDS = [ErrorKind.PROCESS_EXIT, ErrorKind.EXCEPTION, ErrorKind.HANG, ErrorKind.NODE_LOST]


class _Page(HTMLParser):
    """The texts of a page by the section that they are in, and what the page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.loads: list[str] = []
        self.open: list[str] = []
        self._section = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "section":
            self._section = given.get("id") or ""
        if tag in ("script", "link", "img", "iframe") or "src" in given or (given.get("href") or "#")[0] != "#":
            self.loads.append(f"{tag} {given}")
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        self.sections[self._section] = self.sections.get(self._section, "") + data


@pytest.mark.parametrize("kind", KINDS)
def test_every_question_is_answered_on_the_page(
    demo: dict[ErrorKind, tuple[PostMortem, list[Recorded]]], kind: ErrorKind
) -> None:
    made, records = demo[kind]
    parsed = _Page()
    parsed.feed(page.html(made))
    assert parsed.open == []
    sections, incident = parsed.sections, made.incident
    plans = [r.event for r in records if isinstance(r.event, PlanDecided) and r.event.incident == incident.id]
    moves = [r for r in records if isinstance(r.event, StateMoved) and r.event.plan in {p.plan for p in plans}]
    assert plans
    assert moves
    # What failed, and where.
    assert kind.value in sections["failed"]
    assert (incident.worker or incident.node or "") in sections["failed"]
    # What found it, and how late.
    late_s = (incident.detected_at - incident.occurred_at).total_seconds()
    assert f"{incident.method.value} saw it {late_s:.3g} s after it occurred" in sections["found"]
    # What was decided, and why not otherwise.
    for plan in plans:
        assert f"Plan {plan.plan} answers" in sections["decided"]
        if plan.solution is not None:
            assert "Not fewer" in sections["decided"]
            assert all(name in sections["decided"] for name in plan.solution.assignment)
        else:
            assert "Re-planning" in sections["decided"]
    # Where state came from.
    assert (incident.state_source or "no state was moved") in sections["state"]
    assert f"{incident.steps_recomputed} steps computed again" in sections["state"]
    # How long each phase took.
    for phase in made.phases:
        assert phase.duration_s is not None
        assert page.seconds(phase.duration_s) in sections["phases"]
    # What it cost.
    assert f"{incident.cost.detection_worker_s:.1f}" in sections["cost"]
    assert incident.cost.failure_money > 0.0
    # Has it happened before?
    assert f"Of the {made.alike.examined} incidents before" in sections["before"]
    # Each phase is in the course, with its position in the log.
    for move in moves:
        assert str(move.position) in sections["course"]
        assert move.event.phase in sections["course"]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_positions_on_the_page_prove_what_it_says(
    demo: dict[ErrorKind, tuple[PostMortem, list[Recorded]]], kind: ErrorKind
) -> None:
    made, records = demo[kind]
    at = {record.position: record for record in records}
    assert made.timeline[0].since_fault_s == 0.0
    assert [moment.at for moment in made.timeline] == sorted(moment.at for moment in made.timeline)
    for moment in made.timeline:
        assert moment.position is not None
        text = at[moment.position].event.canonical()
        assert made.incident.id in text or any(f'"{plan}"' in text for plan in made.incident.plans)
    for plan in made.plans:
        assert f'"plan":"{plan.id}"' in at[plan.position].event.canonical()


def test_phases_add_up_to_the_whole(demo: dict[ErrorKind, tuple[PostMortem, list[Recorded]]]) -> None:
    for made, _ in demo.values():
        *parts, whole = [phase.duration_s for phase in made.phases]
        assert whole is not None
        assert sum(part or 0.0 for part in parts) == pytest.approx(whole, abs=1e-6)


def test_the_page_loads_nothing_and_its_style_is_the_one_allowed(
    demo: dict[ErrorKind, tuple[PostMortem, list[Recorded]]],
) -> None:
    for made, _ in demo.values():
        parsed = _Page()
        parsed.feed(page.html(made))
        assert parsed.loads == []
    assert re.search(r"style-src 'sha256-[A-Za-z0-9+/]{43}='", page.content_security_policy())


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_incidents_of_every_log_have_pages(golden: Path, tmp_path: Path) -> None:
    for made, _ in post_mortems(golden, tmp_path):
        assert json.loads(made.model_dump_json())["incident"]["id"] == made.incident.id
        parsed = _Page()
        parsed.feed(page.html(made))
        assert parsed.open == []
        assert made.incident.id in page.markdown(made).replace("\\", "")


def test_an_incident_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with history(DEMO, tmp_path) as (_, store, records), store.reading() as views, pytest.raises(NotFound):
        known(views, "no-such", ClusterView(), records[-1].recorded_at)


def test_what_a_process_printed_is_no_markup(demo: dict[ErrorKind, tuple[PostMortem, list[Recorded]]]) -> None:
    made, _ = demo[ErrorKind.EXCEPTION]
    evil = "</pre><script>alert(1)</script> ```` | `x`"
    incident = made.incident.model_copy(update={"evidence": {"traceback": evil}})
    changed = made.model_copy(update={"incident": incident})
    parsed = _Page()
    parsed.feed(page.html(changed))
    assert parsed.loads == []
    assert evil in parsed.sections["evidence"]
    assert f"`````text\n{evil}\n`````" in page.markdown(changed)


@given(st.text())
def test_a_cell_of_markdown_is_one_line_and_no_markup(text: str) -> None:
    cell = page.cell(text)
    assert "\n" not in cell
    assert not set("`*_{}[]<>|#") & set(re.sub(r"\\.", "", cell))


# ---- why not more or fewer


def task(name: str, rates: dict[int, float], **changes: Any) -> TaskProblem:
    posed = {
        "name": name,
        "weight": 1.0,
        "necessary": 1,
        "maximum": 8,
        "current": 4,
        "transition_s": 10.0,
        "running_s": 1000.0,
        "throughput": rates,
    }
    return TaskProblem(**{**posed, **changes})


LINEAR = {x: 1e12 * x for x in range(1, 9)}


def test_a_task_at_its_maximum_says_so() -> None:
    problem = Problem(workers=8, tasks=[task("a", LINEAR, maximum=4)])
    best, _ = solve_with_alternatives(problem)
    (reason,) = count_reasons(problem, best)
    assert (reason.workers, reason.more.workers) == (4, None)
    assert "at most 4" in reason.more.reason
    assert unused(problem, best.assignment) == 4


def test_workers_that_no_layout_can_use_are_idle_for_that_reason() -> None:
    problem = Problem(workers=8, tasks=[task("a", {4: 4e12})])
    best, _ = solve_with_alternatives(problem)
    (reason,) = count_reasons(problem, best)
    assert reason.more.workers is None
    assert "no layout" in reason.more.reason


def test_free_workers_stay_free_where_the_change_costs_more_than_it_brings() -> None:
    problem = Problem(workers=5, tasks=[task("a", {4: 4e12, 5: 4.01e12}, staying=4, newcomers_s=500.0)])
    best, _ = solve_with_alternatives(problem)
    (reason,) = count_reasons(problem, best)
    assert (reason.workers, reason.more.workers) == (4, 5)
    assert reason.more.less_flop is not None
    assert reason.more.less_flop > 0.0
    assert "1 workers are free" in reason.more.reason


def test_a_task_that_would_have_to_take_from_another_names_it_and_the_loss() -> None:
    heavy, light = task("heavy", LINEAR, weight=2.0), task("light", LINEAR, weight=1.0)
    problem = Problem(workers=8, tasks=[heavy.model_copy(update={"maximum": 5}), light])
    best, _ = solve_with_alternatives(problem)
    assert best.assignment["heavy"] > 0
    reasons = {reason.task: reason for reason in count_reasons(problem, best)}
    assert "heavy would have to go down to" in reasons["light"].more.reason


@given(
    st.lists(st.dictionaries(st.integers(1, 8), st.floats(1e10, 1e14), min_size=1), min_size=1, max_size=3),
    st.integers(1, 10),
    st.data(),
)
def test_no_count_within_reach_is_better_than_the_chosen_one(
    rates: list[dict[int, float]], workers: int, data: st.DataObject
) -> None:
    """Of the free workers: a larger count that needs no other task's worker is worth no more, by the solver's proof."""
    tasks = [
        task(f"t{i}", each, current=data.draw(st.integers(0, 8)), weight=data.draw(st.floats(0.1, 3.0)))
        for i, each in enumerate(rates)
    ]
    problem = Problem(workers=workers, tasks=tasks)
    best, _ = solve_with_alternatives(problem)
    free = unused(problem, best.assignment)
    for reason in count_reasons(problem, best):
        more = reason.more
        if more.workers is not None and more.workers - reason.workers <= free:
            assert more.less_flop is not None
            assert more.less_flop >= -1e-9 * abs(best.objective)
            assert "costs more than it brings" in more.reason


def test_replanning_weighs_the_survivors_against_the_worker_s_return() -> None:
    problem = Problem(workers=8, tasks=[task("a", LINEAR, staying=4, newcomers_s=20.0)])
    model = replanned("p1", problem, "a", 4, 1)
    assert model is not None
    assert model.shrunk_workers == 3
    assert model.restored_flop == pytest.approx(4e12 * (1000.0 - 30.0))
    assert model.shrunk_flop == pytest.approx(3e12 * 1000.0 - 4e12 * 10.0)
    assert replanned("p1", problem, "b", 4, 1) is None
