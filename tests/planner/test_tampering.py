"""The verify matrix: each kind of tampering with a log is made, and replay names it and says where.

The log is a recorded one (tests/logs), changed as somebody would who can write the database's file: with the hash chain
as it was, or computed anew.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli.records.replay import replay
from services.planner.replay.replay import Replayer
from services.planner.replay.verification import Report
from shared.errors import InvalidInput, OlderVersion
from shared.events.union import OLDEST_DECIDER, NodeCordoned
from shared.log.anchors import Anchor, parse_anchor
from shared.log.base import FIRST_HASH
from shared.log.chain import row_hash
from shared.log.log import EventLog
from shared.log.schema import COLUMNS
from shared.model import canonical_json
from tests.logs.kit import Row, golden_log, read_rows, restore

ROWS = read_rows(golden_log("demo"))
HEAD = ROWS[-1]["hash"]
Rows = list[Row]


def at(kind: str, number: int = 0) -> int:
    """The index of an event of a type."""
    return [index for index, row in enumerate(ROWS) if row["type"] == kind][number]


PLAN = at("plan.decided", 5)
MOVING = at("plan.decided", 6)
TABLED = at("plan.decided", 4)
JOINED = next(
    index
    for index, row in enumerate(ROWS)
    if row["type"] == "node.joined" and json.loads(ROWS[index + 1]["data"]).get("cause") == row["event_id"]
)
"""Of a node whose plan follows at once."""
ERROR = at("error.detected", 1)
PROGRESSED = at("task.progressed", 3)
MOVED = at("state.moved", 4)
SUBMITTED = at("task.submitted")
FIRST_MOVED = next(
    index
    for index, row in enumerate(ROWS)
    if row["type"] == "state.moved" and json.loads(row["data"])["task"] == json.loads(ROWS[SUBMITTED]["data"])["task"]
)
SWAPPED = next(
    index for index in range(PROGRESSED, len(ROWS)) if ROWS[index]["recorded_at"] < ROWS[index + 1]["recorded_at"]
)
MEASURED = at("task.progressed", 11)
"""Of the last step time of a task before a plan for which the solver is asked."""
NEXT_SOLVED = 1 + next(
    index
    for index, row in enumerate(ROWS)
    if index > MEASURED and row["type"] == "plan.decided" and json.loads(row["data"])["problem"] is not None
)
"""Position of the next plan for which the solver is asked after that."""
LAST = at("task.progressed", -1)


def unchained(rows: Rows, index: int, **fields: Any) -> Rows:
    """One event changed, with all columns but its JSON as they were."""
    rows[index] = {**rows[index], "data": canonical_json({**json.loads(rows[index]["data"]), **fields})}
    return rows


def rechained(rows: Rows) -> Rows:
    """The rows with places, versions and hashes computed anew, in their order."""
    previous_hash, versions, found = FIRST_HASH, dict[str, int](), []
    for position, row in enumerate(rows, start=1):
        versions[row["stream"]] = versions.get(row["stream"], 0) + 1
        row = {**row, "position": position, "stream_version": versions[row["stream"]], "previous_hash": previous_hash}
        row["hash"] = previous_hash = row_hash(row)
        found.append(row)
    return found


def changed(index: int, **fields: Any) -> Callable[[Rows], Rows]:
    """One event changed, and the chain computed anew."""

    def change(rows: Rows) -> Rows:
        return rechained(unchained(rows, index, **fields))

    return change


def without(index: int) -> Callable[[Rows], Rows]:
    return lambda rows: rechained(rows[:index] + rows[index + 1 :])


def swapped(index: int, *, times: bool = True) -> Callable[[Rows], Rows]:
    """Two neighbours exchanged; ``times``: they keep the places' times."""

    def swap(rows: Rows) -> Rows:
        one, other = rows[index], rows[index + 1]
        if times:
            one, other = one | {"recorded_at": other["recorded_at"]}, other | {"recorded_at": one["recorded_at"]}
        rows[index], rows[index + 1] = other, one
        return rechained(rows)

    return swap


def inserted(index: int, like: int, **fields: Any) -> Callable[[Rows], Rows]:
    """A further event, made of another one of the log; a later plan than its cause calls for stays as it is."""

    def insert(rows: Rows) -> Rows:
        event = {**json.loads(rows[like]["data"]), "event_id": "forged", **fields}
        row = {**rows[like], "event_id": "forged", "recorded_at": rows[index]["recorded_at"]}
        if "task" in fields and row["stream"] != "cluster":
            row["stream"] = f"task/{fields['task']}"
        if "node" in fields and row["stream"] != "cluster":
            row["stream"] = f"node/{fields['node']}"
        return rechained([*rows[: index + 1], {**row, "data": canonical_json(event)}, *rows[index + 1 :]])

    return insert


def doubled(rows: Rows) -> Rows:
    return rechained([*rows, rows[PROGRESSED] | {"recorded_at": rows[-1]["recorded_at"]}])


def node_from_nowhere(rows: Rows) -> Rows:
    occurred_at = rows[PROGRESSED]["recorded_at"]
    event = NodeCordoned(event_id="forged", occurred_at=datetime.fromisoformat(occurred_at), node="n9")
    row = rows[PROGRESSED] | {
        "event_id": "forged",
        "stream": "node/n9",
        "type": event.type,
        "occurred_at": occurred_at,
        "data": event.canonical(),
    }
    return rechained([*rows[: PROGRESSED + 1], row, *rows[PROGRESSED + 1 :]])


def event_of(index: int) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(ROWS[index]["data"])
    return event


def other_members() -> list[Any]:
    """The changes of a plan that moves a task, with the members of two sources exchanged."""
    changes: list[Any] = json.loads(canonical_json(event_of(MOVING)["changes"]))
    change = next(change for change in changes if change["target"])
    one, other = change["target"]["members"]
    one["workers"], other["workers"] = other["workers"], one["workers"]
    return changes


def other_tables() -> dict[str, Any]:
    """The throughput tables of a plan, each with twice the rates."""
    tables: dict[str, Any] = event_of(TABLED)["tables"]
    for table in tables.values():
        table["throughput"] = {count: 2.0 * rate for count, rate in table["throughput"].items()}
    return tables


def write(rows: Rows, path: Path) -> Path:
    """Write rows into a log that has all guards, whatever the rows are."""
    EventLog(f"sqlite:///{path}").close()
    places = ", ".join("?" for _ in COLUMNS)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        if len({row["event_id"] for row in rows}) < len(rows):
            (table,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'log'").fetchone()
            connection.execute("DROP TABLE log")
            connection.execute(table.replace("UNIQUE (event_id)", "CHECK (event_id != '')"))
        with connection:
            connection.executemany(f"INSERT INTO log VALUES ({places})", [[row[n] for n in COLUMNS] for row in rows])
        for _, sql in triggers:
            connection.execute(sql)
    return path


def judged(rows: Rows, path: Path, *anchors: Anchor) -> Report:
    return Replayer.of_file(write(rows, path)).verify(anchors)


def named(report: Report) -> list[tuple[int, str]]:
    """Everything that the report names, with its position."""
    found = [(problem.position, problem.what) for problem in report.problems]
    return found + [(mismatch.position, mismatch.problem) for mismatch in report.mismatches]


MATRIX: dict[str, tuple[Callable[[Rows], Rows], int, str]] = {
    # the chain as it was
    "changed event": (lambda rows: unchained(rows, ERROR, rank=7), ERROR + 1, "does not match its hash"),
    "changed hash": (
        lambda rows: [*rows[:9], rows[9] | {"hash": "0" * 64}, *rows[10:]],
        10,
        "position 10: the row does not match its hash",
    ),
    "removed event": (lambda rows: rows[:19] + rows[20:], 21, "position 20 is missing"),
    "removed start": (lambda rows: rows[5:], 6, "position 1 is missing: 6 follows 0"),
    # the chain computed anew
    "removed trigger": (without(JOINED), JOINED + 1, "nothing in the log calls for it"),
    "removed plan": (without(PLAN), PLAN, "has no plan in the log"),
    "removed first submission": (without(SUBMITTED), FIRST_MOVED, "was never submitted"),
    "swapped events": (swapped(SWAPPED, times=False), SWAPPED + 2, "recorded before the row that precedes it"),
    "swapped cause and plan": (swapped(PLAN - 1), PLAN, "recorded before its cause"),
    "moved to another stream": (
        lambda rows: rechained([*rows[:PROGRESSED], rows[PROGRESSED] | {"stream": "task/x"}, *rows[PROGRESSED + 1 :]]),
        PROGRESSED + 1,
        "column stream contradicts the event",
    ),
    "doubled id": (doubled, len(ROWS) + 1, f"is that of position {PROGRESSED + 1} too"),
    "forged plan": (
        changed(at("plan.decided", 6), changes=other_members()),
        at("plan.decided", 6) + 1,
        "decided again",
    ),
    "plan from nowhere": (inserted(PLAN, PLAN, plan="p99"), PLAN + 2, "nothing in the log calls for it"),
    "higher decider": (changed(PLAN, decider=99), PLAN + 1, "decider 99 is newer than this program's"),
    "lower decider": (changed(PLAN, decider=0), PLAN + 1, f"greater than or equal to {OLDEST_DECIDER}"),
    "altered table": (changed(TABLED, tables=other_tables()), TABLED + 1, "other contents than its digest says"),
    "missing table": (changed(TABLED, tables={}), TABLED + 1, "is in no plan before it, nor in this one"),
    "changed measurement": (changed(MEASURED, step_s=1e-4), NEXT_SOLVED, "decided again"),
    "event of no task": (inserted(PROGRESSED, PROGRESSED, task="x"), PROGRESSED + 2, "task x was never submitted"),
    "event of no node": (node_from_nowhere, PROGRESSED + 2, "node n9 has never joined"),
    "steps that fall": (inserted(PROGRESSED, PROGRESSED, step=0), PROGRESSED + 2, "is at step 0 of generation"),
    "more steps than there are": (
        changed(at("task.progressed", -1), step=10**6),
        at("task.progressed", -1) + 1,
        "step",
    ),
    "generation of no plan": (changed(PROGRESSED, generation=50), PROGRESSED + 1, "plans have given it"),
    "task that ends twice": (
        inserted(len(ROWS) - 1, at("task.finished")),
        len(ROWS) + 1,
        "ends twice",
    ),
    "task submitted twice": (
        inserted(at("task.submitted") + 1, at("task.submitted")),
        at("task.submitted") + 3,
        "is submitted again before it has ended",
    ),
    "execution of no plan": (changed(MOVED, plan="p77"), MOVED + 1, "no plan before it is named p77"),
    "execution of another stage": (inserted(MOVED, MOVED, generation=40), MOVED + 2, "generation 40 of task"),
    "execution before its start": (
        changed(MOVED, started_at="2999-01-01T00:00:00Z"),
        MOVED + 1,
        "the phase ended before it started",
    ),
    "incident opened twice": (inserted(ERROR, ERROR), ERROR + 2, "was opened before"),
    "escalation of nothing": (changed(ERROR, escalates="nothing"), ERROR + 1, "it escalates nothing"),
    "detection before the fault": (
        changed(ERROR, detected_at="1999-01-01T00:00:00Z"),
        ERROR + 1,
        "detected before it occurred",
    ),
    "damaged event": (
        lambda rows: rechained([*rows[:MOVED], rows[MOVED] | {"data": "{}"}, *rows[MOVED + 1 :]]),
        MOVED + 1,
        "not an event",
    ),
}


@pytest.mark.parametrize("kind", MATRIX)
def test_each_kind_of_tampering_is_named_with_its_position(kind: str, tmp_path: Path) -> None:
    tamper, position, words = MATRIX[kind]
    report = judged(tamper(list(ROWS)), tmp_path / "log.db")
    assert not report.ok
    found = named(report)
    assert any(at == position and words in what for at, what in found), (position, found)
    if kind != "removed start":
        # A single event that was changed makes few complaints.
        assert len(report.problems) <= 12, report.problems


def test_a_plan_of_a_decider_that_is_not_readable_any_more_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OlderVersion, match=f"position {PLAN + 1}: .* its plan is of decider {OLDEST_DECIDER - 1}"):
        judged(changed(PLAN, decider=OLDEST_DECIDER - 1)(list(ROWS)), tmp_path / "log.db")


PRICE = changed(0, price_per_worker_hour=0.01)
EVIDENCE = changed(ERROR, evidence={"exit_code": 0})


@pytest.mark.parametrize(("tamper", "changed_at"), [(PRICE, 1), (EVIDENCE, ERROR + 1)])
def test_what_no_decision_used_is_caught_by_an_anchor_alone(
    tamper: Callable[[Rows], Rows], changed_at: int, tmp_path: Path
) -> None:
    """As docs/log.md says. An anchor brackets the change with the last one before it that holds."""
    rows = tamper(list(ROWS))
    path = write(rows, tmp_path / "log.db")
    assert Replayer.of_file(path).verify().ok
    before = [Anchor(ROWS[changed_at - 2]["hash"], changed_at - 1)] if changed_at > 1 else []
    after = Anchor(ROWS[changed_at + 4]["hash"], changed_at + 5)
    report = Replayer.of_file(path).verify([*before, after])
    assert report.problem is not None
    assert report.problem.position == changed_at + 5
    since = f"behind position {changed_at - 1}" if before else "up to there"
    assert report.problem.what.endswith(f"an event {since} was changed")
    report = Replayer.of_file(path).verify([Anchor(HEAD)])
    assert report.problem is not None
    assert "an event was changed and the chain computed anew" in report.problem.what


def test_a_tail_that_was_cut_off_is_caught_by_an_anchor_alone(tmp_path: Path) -> None:
    path = write(list(ROWS[:-20]), tmp_path / "log.db")
    last = len(ROWS) - 20
    assert Replayer.of_file(path).verify([Anchor(ROWS[9]["hash"]), Anchor(ROWS[9]["hash"], 10)]).ok
    for anchor, words in (
        (Anchor(HEAD, len(ROWS)), f"the log ends at position {last}, before the expected head at {len(ROWS)}"),
        (Anchor(HEAD), f"no event up to the end at position {last} has the expected head"),
    ):
        report = Replayer.of_file(path).verify([anchor])
        assert not report.ok
        assert report.problem is not None
        assert report.problem.position == last + 1
        assert report.problem.what.startswith(words)
    app = typer.Typer()
    app.command()(replay)
    result = CliRunner().invoke(app, [str(path), "--verify", "--expect-head", f"{len(ROWS)}:{HEAD}", "-o", "json"])
    assert result.exit_code == 6
    printed = json.loads(result.stdout)
    assert printed["problem"]["position"] == last + 1
    assert printed["head"] == ROWS[last - 1]["hash"]
    result = CliRunner().invoke(app, [str(path)])
    assert f"head {last}:{printed['head']}" in result.stdout


def test_guards_that_the_table_lacks_are_named(tmp_path: Path) -> None:
    path = restore(ROWS, tmp_path / "log.db")
    assert Replayer.of_file(path).verify([Anchor(HEAD, len(ROWS))]).ok
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TRIGGER log_no_delete")
        connection.execute("DROP TRIGGER log_no_update")
        connection.execute(
            "CREATE TRIGGER log_no_update BEFORE UPDATE ON log WHEN 0 BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
        connection.commit()
    report = Replayer.of_file(path).verify()
    assert [problem.what for problem in report.problems] == [
        "the table lacks the trigger log_no_delete",
        "the table lacks the trigger log_no_update as it was created",
    ]
    assert report.chain_ok
    assert not report.ok


@pytest.mark.parametrize("text", ["", "abc", "12", f"x:{'0' * 64}", "F" * 64, f"-1:{'0' * 64}"])
def test_an_anchor_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="neither HASH nor POSITION:HASH"):
        parse_anchor(text)
