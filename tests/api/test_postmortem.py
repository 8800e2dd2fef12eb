"""The post-mortem of an incident answers an operator's questions, each from the log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.api.postmortem import evidence, page, words
from services.api.postmortem.gather import known, post_mortem
from services.api.postmortem.injections import can_have_caused, slows_down
from services.api.postmortem.model import PostMortem, Shortfall
from services.api.postmortem.standing import headline, standing, todo
from services.api.postmortem.words import seconds
from services.api.store.projection_store import Store
from services.api.store.tables import INCIDENTS
from shared.errors import NotFound
from shared.events.plans import Response, TaskChange, Trigger
from shared.events.severities import ErrorKind, Severity
from shared.events.union import FaultInjected, PlanDecided, Recorded, StateMoved, TaskFailed
from shared.views.documents import ClusterView, NodeState
from tests.api.kit import START, Story, restart
from tests.api.pages import ParsedPage, history
from tests.logs.kit import COURSES, GOLDEN, golden_log, read_rows

DEMO = golden_log("demo")
"""A log of the demo: a kill, an exception, a hang and a lost node."""


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


@pytest.mark.parametrize("kind", KINDS)
def test_every_question_is_answered_on_the_page(
    demo: dict[ErrorKind, tuple[PostMortem, list[Recorded]]], kind: ErrorKind
) -> None:
    made, records = demo[kind]
    parsed = ParsedPage()
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
        assert "Not fewer" in sections["decided"]
        assert "Not more" in sections["decided"]
        if plan.solution is not None:
            assert all(name in sections["decided"] for name in plan.solution.assignment)
        else:
            assert "Re-planning would have given: demo-gpt-large" in sections["decided"]
            assert "The answer to this severity is fixed" in sections["decided"]
    # Where state came from: each member, what it did, and the record that says so.
    assert (incident.state_source or "no state was moved") in sections["state"]
    assert f"{incident.steps_recomputed} steps computed again" in sections["state"]
    for move in moves:
        for worker, source in move.event.sources.items():  # type: ignore[union-attr]
            assert worker in sections["state"]
            assert words.SOURCES[source] in sections["state"]
            assert str(move.position) in sections["state"]
    # How long each phase took.
    for phase in made.phases:
        assert phase.duration_s is not None
        assert seconds(phase.duration_s) in sections["phases"]
    # What it cost.
    assert f"{incident.cost.detection_worker_s:.1f}" in sections["cost"]
    assert incident.cost.failure_money > 0.0
    assert "With the answer plain-restart (a model)" in sections["cost"]
    assert ("With the answer wait-for-the-node (a model)" in sections["cost"]) is (kind is ErrorKind.NODE_LOST)
    # Has it happened before?
    earlier = sum(r.position < made.detected for r in records if r.event.type == "error.detected")
    assert made.alike.examined == earlier
    assert (f"of the {earlier} before" if earlier else "No: the log has no earlier incident") in sections["before"]
    # Each phase is in the course, with its position in the log.
    for move in moves:
        assert str(move.position) in sections["course"]
        assert move.event.phase in sections["course"]  # type: ignore[union-attr]


SHORT = {
    ErrorKind.PROCESS_EXIT: "uid/0 injected the fault kill there",
    ErrorKind.EXCEPTION: "uid/0 injected the fault exception there",
    ErrorKind.HANG: "uid/0 injected the fault hang=stop there",
    ErrorKind.NODE_LOST: "the node is left out of use, and its workers' work is planned anew",
}
SEEN = {
    ErrorKind.PROCESS_EXIT: "The process ended by SIGKILL.",
    ErrorKind.EXCEPTION: "InjectedFault: injected at step",
    ErrorKind.HANG: "(rank 1) gave no stack: stopped by a signal",
    ErrorKind.NODE_LOST: "The node had been silent for",
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_begins_with_what_an_operator_asks_first(
    demo: dict[ErrorKind, tuple[PostMortem, list[Recorded]]], kind: ErrorKind
) -> None:
    made, records = demo[kind]
    parsed = ParsedPage()
    parsed.feed(page.html(made))
    short = parsed.sections["short"]
    assert next(iter(parsed.sections[name] for name in parsed.sections if name)) is short
    assert "Over: all tasks train on the workers that the plan gives them" in short
    assert f"What to do: {made.todo[0].replace('`', '')}" in short
    assert words.KINDS[kind] in short
    assert SHORT[kind] in short
    assert f"{made.incident.severity.value} means: {words.SEVERITIES[made.incident.severity]}" in short
    assert SEEN[kind] in parsed.sections["failed"]
    if made.injected is not None:
        assert records[made.injected.position - 1].event.type == "fault.injected"
        assert made.injected.position < made.detected
    assert (made.injected is None) == (kind is ErrorKind.NODE_LOST)


def test_an_incident_that_goes_on_says_so(demo: dict[ErrorKind, tuple[PostMortem, list[Recorded]]]) -> None:
    made, _ = demo[ErrorKind.HANG]
    lasting = made.incident.model_copy(update={"restored_at": None, "closed_at": None})
    now = lasting.occurred_at + timedelta(seconds=90)
    open_ = made.model_copy(update={"closed": False, "standing": standing(lasting, [], now)})
    open_for = "open for 90.00 s (none of its kind was healed before)"
    assert headline(lasting, [], None, now).endswith(f"; not at planned strength yet: {open_for}")
    parsed = ParsedPage()
    parsed.feed(page.html(open_))
    assert "Not over" in parsed.sections["short"]
    assert "- Not over: not all tasks train" in page.markdown(open_)


def test_a_hang_shows_where_each_rank_stood(demo: dict[ErrorKind, tuple[PostMortem, list[Recorded]]]) -> None:
    made, _ = demo[ErrorKind.HANG]
    parsed = ParsedPage()
    parsed.feed(page.html(made))
    assert [rank.rank for rank in made.ranks] == [0, 1, 2, 3]
    assert made.ranks[1].process == "stopped"
    assert {rank.process for rank in made.ranks} == {"stopped", "sleeping"}
    assert "Ranks 0, 2, 3 waited in gloo:all_reduce" in parsed.sections["failed"]
    shown = re.findall(r"stacks of rank ([\d, ]*\d)", parsed.sections["evidence"])
    assert {"0", "2", "3"} <= set(", ".join(shown).split(", "))


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ("silence_s", "The node had been silent for"),
        ("listened_s", "The node had not been heard since the detector began to listen, for"),
    ],
)
def test_a_lost_node_has_the_silence_that_is_known(known: str, said: str) -> None:
    assert list(evidence.statements({known: 1.6, "limit_s": 1.5})) == [f"{said} 1.60 s; the limit was 1.50 s."]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4))
def test_evidence_of_any_form_has_a_page(value: object) -> None:
    names = ["exit", "error", "reason", "stalled_s", "limit_s", "collectives", "without_stack", "advice", "ranks"]
    names += ["ranks_left_out", "most_ranks"]
    found: dict[str, Any] = dict.fromkeys((*names, "stacks", "traceback"), value)
    for one in (found, {**found, "ranks": {"n0/0": found}, "collectives": [found], "without_stack": {"n0/0": found}}):
        assert all(isinstance(line, str) for line in evidence.statements(one))
        assert all(rank.worker for rank in evidence.rank_states(one))
        assert all(text for _, text in evidence.texts(one))


def test_every_word_of_the_log_has_a_meaning() -> None:
    assert words.KINDS.keys() == set(ErrorKind)
    assert words.SEVERITIES.keys() == set(Severity)
    for golden in GOLDEN:
        moved = [row for row in read_rows(golden) if row["type"] == "state.moved"]
        for row in moved:
            event = json.loads(row["data"])
            assert event["durations_s"].keys() <= words.PARTS.keys()
            assert set(event["sources"].values()) <= words.SOURCES.keys()


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
        names = [made.incident.id, *made.incident.plans]
        if kind is ErrorKind.NODE_LOST:
            names.append(str(made.incident.node))  # which joins again
        assert any(f'"{name}"' in text for name in names)
    for phase in made.phases:
        assert phase.position is not None
    ends = {phase.name: at[phase.position] for phase in made.phases if phase.position is not None}
    assert ends["detection"].event.type == "error.detected"
    assert ends["decision"].event.type == "plan.decided"
    assert ends["interrupted step"].event.phase == "resumed"  # type: ignore[union-attr]
    assert ends["planned strength"].event.phase == "restored"  # type: ignore[union-attr]
    assert ends["planned strength"].event.occurred_at == made.incident.restored_at
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
        parsed = ParsedPage()
        parsed.feed(page.html(made))
        assert parsed.loads == []
    assert "color-scheme: light dark" in page.html(made)
    assert "@media print" in page.html(made)
    assert re.search(r"style-src 'sha256-[A-Za-z0-9+/]{43}='", page.content_security_policy())


@pytest.mark.parametrize("golden", COURSES)
def test_incidents_of_every_log_have_pages(golden: Path, tmp_path: Path) -> None:
    for made, _ in post_mortems(golden, tmp_path):
        assert json.loads(made.model_dump_json())["incident"]["id"] == made.incident.id
        parsed = ParsedPage()
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
    parsed = ParsedPage()
    parsed.feed(page.html(changed))
    assert parsed.loads == []
    assert evil in parsed.sections["evidence"]
    assert f"`````text\n{evil}\n`````" in page.markdown(changed)


@given(st.text())
def test_a_cell_of_markdown_is_one_line_and_no_markup(text: str) -> None:
    cell = page.cell(text)
    assert "\n" not in cell
    assert not set("`*_{}[]<>|#") & set(re.sub(r"\\.", "", cell))


def test_a_lost_node_leaves_a_task_with_fewer_workers(
    demo: dict[ErrorKind, tuple[PostMortem, list[Recorded]]],
) -> None:
    made, records = demo[ErrorKind.NODE_LOST]
    (short,) = made.shortfalls
    assert (short.workers, short.before) == (2, 4)
    node = made.incident.node
    again = f"after the fault, {short.task} on 2 of 4 workers; {node} was back after"
    assert re.search(rf"training again \d+\.\d\d s {again}", made.headline)
    ended = next(record for record in records if record.position == short.position)
    assert ended.recorded_at == short.until
    assert any(f"{short.task} went on with 2 of 4 workers" in line for line in made.standing)
    joined = next(moment for moment in made.timeline if moment.what == f"node {node} joined again")
    assert records[(joined.position or 0) - 1].event.type == "node.joined"
    lasting = standing(made.incident, [Shortfall(**{**short.model_dump(), "until": None})], made.as_of)
    assert lasting[1].endswith("and still has fewer than before.")


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (NodeState.LOST, "{} is lost: start the machine, or the service on it; the node joins again by itself."),
        (NodeState.ISOLATED, "{0} is isolated: mend its cause, then `unicron return {0}`."),
        (NodeState.READY, "Nothing: {} is ready now. If it happens again, look at its machine."),
        (NodeState.LEFT, "Nothing: {} has left since."),
    ],
)
def test_what_to_do_about_a_lost_node_depends_on_its_present_state(
    demo: dict[ErrorKind, tuple[PostMortem, list[Recorded]]], node: NodeState, said: str
) -> None:
    incident = demo[ErrorKind.NODE_LOST][0].incident
    assert todo(incident, node, []) == [said.format(incident.node)]


def test_a_task_that_failed_is_no_success(story: Story, tmp_path: Path) -> None:
    story.running()
    story.at(100.5).error("i1", 100, task="gpt", node="n1", worker="n1/1", rank=3, generation=1, step=90)
    story.at(101).plan("p1", restart(), trigger=Trigger.ERROR, response=Response.RESTART, incident="i1")
    reason = "process-exit (exit 1) at step 12 happened 2 times; max_restarts is 1: ValueError: no such shard"
    failed = story.at(106).add(TaskFailed, task="gpt", generation=3, step=12, reason=reason, incident="i1")
    over = TaskChange(task="gpt", reason="it has failed", action="end", from_generation=3)
    story.at(106.1).plan("p2", over, trigger=Trigger.TASK_ENDED, supersedes=["p1"])
    ended = story.at(106.4).moved("p2", "gpt", "ended", 3, complete=True)
    with story_store(story, tmp_path) as store, store.reading() as views:
        found = known(views, "i1", ClusterView(), ended.recorded_at)
        made = post_mortem(found, story.log, ClusterView(), ended.recorded_at)
    assert made.incident.failed_tasks == {"gpt": reason}
    assert made.incident.resumed_at is None
    assert made.headline.endswith("; gpt failed")
    assert made.standing[0] == f"gpt failed: {reason}."
    assert "train" not in made.standing[1]
    assert made.todo == ["gpt: look at the last error below, mend its cause, then `unicron resume gpt`."]
    assert failed.position in [moment.position for moment in made.timeline]
    assert "interrupted step" not in [phase.name for phase in made.phases]


@contextmanager
def story_store(story: Story, folder: Path) -> Iterator[Store]:
    """Give the projections of a story."""
    store = Store(f"sqlite:///{folder / 'projections.db'}")
    try:
        store.fold(list(story.log.read_all()))
        yield store
    finally:
        store.close()


@pytest.mark.parametrize(
    ("fault", "kind", "after_s", "caused"),
    [
        ("kill", ErrorKind.PROCESS_EXIT, 300.0, True),
        ("kill", ErrorKind.HANG, 1.0, False),
        ("hang=stop", ErrorKind.HANG, 1.0, True),
        ("slow=1", ErrorKind.PROCESS_EXIT, 20.0, False),
        ("spike=10", ErrorKind.NON_FINITE, 1.0, False),
        ("nan", ErrorKind.NON_FINITE, 1.0, True),
        ("xid=79", ErrorKind.DEVICE, 0.1, True),
        ("disconnect=15", ErrorKind.NODE_LOST, 10.0, True),
        ("disconnect=15", ErrorKind.NODE_LOST, 308.0, False),
        ("disconnect=forever", ErrorKind.NODE_LOST, 308.0, True),
        ("of a later version", ErrorKind.EXCEPTION, 1.0, False),
    ],
)
def test_a_fault_is_called_a_test_only_if_the_injected_one_leads_to_it(
    fault: str, kind: ErrorKind, after_s: float, caused: bool
) -> None:
    asked = FaultInjected(event_id="f", occurred_at=START, fault=fault, task="gpt", rank=1)
    assert can_have_caused(asked, kind, START + timedelta(seconds=after_s)) is caused


@pytest.mark.parametrize(("fault", "slower"), [("slow=3", True), ("slow=1", False), ("kill", False), ("later", False)])
def test_the_end_of_an_injected_slowdown_makes_nothing_slow(fault: str, slower: bool) -> None:
    assert slows_down(FaultInjected(event_id="f", occurred_at=START, fault=fault, task="gpt", rank=1)) is slower
