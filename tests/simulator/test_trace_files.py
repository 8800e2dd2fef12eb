"""Traces as files: what is written is read again, and what is wrong is named by line, field and value."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.errors import InvalidInput, NotFound
from simulator.workloads.paper_workloads import NAMES, infinitehbd, spot, workload
from simulator.workloads.random_workloads import random_workload
from simulator.workloads.trace import Change, Occurrence, Trace
from simulator.workloads.trace_files import LIGHTER, parse_spot_trace, parse_trace, read_trace, write_trace

HEADER = "time_s,node,event,kind,slowdown\n"

PIECES = ["1", "a", "up", "down", "add", ",", "\n", '"', "#", ":"]

# Words of a cause: no line breaks, which end a line of the file, and no spaces at either end.
WORDS = st.text(st.characters(exclude_categories=["Cc", "Cs", "Z"]) | st.just(" "), max_size=20).map(str.strip)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Traces in which each node's events are possible; later nodes in the order in which they join."""
    count = draw(st.integers(1, 5))
    names = [f"n{number}" for number in range(count)]
    present = draw(st.integers(0, count))
    there = set(names[:present])
    at_s, found, joined = 0.0, list[Occurrence](), names[:present]
    for _ in range(draw(st.integers(0, 12))):
        at_s += draw(st.floats(0.001, 1e6))
        changes: list[Change] = ["up"]
        if there:
            changes += ["down", "degraded", "error"]
        change = draw(st.sampled_from(changes))
        node = draw(st.sampled_from(sorted(there) if change != "up" else names[: len(joined) + 1]))
        slowdown = draw(st.floats(1.0, 100.0, exclude_min=True)) if change == "degraded" else 1.0
        kind = draw(st.sampled_from([*LIGHTER, ""])) if change == "error" else draw(WORDS)
        if change == "up":
            there.add(node)
            joined += [node] if node not in joined else []
        elif change == "down":
            there.remove(node)
        task = draw(st.sampled_from(["", "gpt"])) if change == "error" else ""
        found.append(Occurrence(at_s, node, change, kind, slowdown, task))
    if not joined:
        return Trace("t", ("n0",), 1, (), 10.0)
    return Trace(draw(WORDS), tuple(joined), present, tuple(found), at_s + draw(st.floats(0.0, 1e6)))


@settings(deadline=None)
@given(traces())
@example(Trace("", ("n0",), 1, (Occurrence(0.1 + 0.2, "n0", "down", 'a "cause", with commas'),), 0.5))
def test_what_is_written_is_read(trace: Trace) -> None:
    assert parse_trace(write_trace(trace)) == trace


@pytest.mark.parametrize("name", NAMES)
def test_named_traces_survive_a_file(name: str, tmp_path: Path) -> None:
    trace = workload(name, 5).trace
    (tmp_path / "trace.csv").write_text(write_trace(trace))
    assert read_trace(tmp_path / "trace.csv") == trace


@pytest.mark.parametrize("seed", range(20))
def test_random_traces_survive_a_file(seed: int) -> None:
    trace = random_workload(seed).trace
    found = parse_trace(write_trace(trace))
    assert (found.occurrences, found.present) == (trace.occurrences, trace.present)


def test_nodes_and_length_of_a_bare_file() -> None:
    """A node whose first event is no ``up`` was there before; without a length the last day counts in full."""
    found = parse_trace("node,event,time_s\nb,down,3600\na,up,7200\nb,up,90000\nc,up,0\n", name="bare")
    assert found == Trace(
        "bare",
        ("c", "b", "a"),
        2,
        (Occurrence(3600, "b", "down"), Occurrence(7200, "a", "up"), Occurrence(90000, "b", "up")),
        2 * 86_400,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a trace without events"),
        (HEADER, "a trace without events"),
        ("time,node,event\n1,a,up\n", "line 1: column: 'time'; allowed are time_s, node, event, kind, slowdown"),
        ("time_s,node\n1,a\n", "line 1: columns: 'no event'; allowed are each of time_s, node, event once"),
        ("time_s,node,event,event\n1,a,up,up\n", "line 1: columns: 'time_s,node,event,event'; allowed are each"),
        (HEADER + "1,a\n", "line 2: line: '1,a'; allowed are 5 fields"),
        (HEADER + "1,a,up,,1,2\n", "line 2: line: '1,a,up,,1,2'; allowed are 5 fields"),
        (HEADER + "# a comment\n\n-1,a,up\n", "line 4: time_s: '-1'; allowed are numbers of at least 0"),
        (HEADER + "soon,a,up\n", "line 2: time_s: 'soon'; allowed are numbers of at least 0"),
        (HEADER + "nan,a,up\n", "line 2: time_s: 'nan'; allowed are numbers of at least 0"),
        (HEADER + "inf,a,up\n", "line 2: time_s: 'inf'; allowed are numbers of at least 0"),
        (HEADER + "1,Node.1,up\n", "line 2: node: 'Node.1'; allowed are names of 1 to 63 lower-case letters"),
        (HEADER + "1,a,gone\n", "line 2: event: 'gone'; allowed are up, down, degraded, error"),
        (HEADER + "1,a,error,fire\n", "line 2: kind: 'fire'; allowed are of an error, process-exit"),
        (HEADER + "1,a,error,node-lost\n", "line 2: kind: 'node-lost'; allowed are of an error"),
        (HEADER + "1,a,degraded,,1\n", "line 2: slowdown: '1'; allowed are numbers above 1"),
        (HEADER + "1,a,degraded\n", "line 2: slowdown: ''; allowed are numbers"),
        (HEADER + "1,a,down,,2\n", "line 2: slowdown: '2'; allowed are no values for the event down"),
        (HEADER + "1,a,down\n2,a,down\n", "line 3: event: 'down'; allowed are up, since node 'a' is not there at 2 s"),
        (HEADER + "1,a,down\n2,a,error\n", "line 3: event: 'error'; allowed are up"),
        ("# horizon_s: 5\n" + HEADER + "9,a,down\n", "line 3: time_s: '9'; allowed are up to the horizon, 5 s"),
        ("# horizon_s: long\n" + HEADER + "9,a,down\n", "line 1: horizon_s: 'long'; allowed are numbers"),
    ],
)
def test_errors_name_line_field_and_value(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_trace(text)
    assert message in caught.value.detail


@settings(deadline=None)
@given(st.text(max_size=200) | st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_is_a_trace_or_an_error(text: str) -> None:
    for parse in (parse_trace, parse_spot_trace):
        with suppress(InvalidInput):
            assert parse(HEADER + text if parse is parse_trace else text).nodes


def test_spot_trace() -> None:
    """The first 7 minutes of the file, counted by hand: 18 instances at 0, then one each at 60 s and 180 s."""
    trace = spot("p3")
    assert (trace.present, len(trace.nodes), trace.horizon_s) == (18, 177, 40_920.0)
    assert [(each.at_s, each.node, each.change) for each in trace.occurrences[:2]] == [
        (60.0, "node19", "up"),
        (180.0, "node20", "up"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,add\n", "line 1: line: '0,add'; allowed are time_ms,add|remove,node"),
        ("0,add,a\n5,kill,a\n", "line 2: event: 'kill'; allowed are add, remove"),
        ("0,add,a\n5,remove,b\n6,remove,b\n", "line 3: event: 'down'; allowed are up"),
        ("x,add,a\n", "line 1: time_ms: 'x'; allowed are numbers of at least 0"),
    ],
)
def test_errors_of_spot_traces(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_spot_trace(text)
    assert message in caught.value.detail


def test_files_of_both_formats(tmp_path: Path) -> None:
    (tmp_path / "spot.csv").write_text("0,add,a\n1500,remove,a\n")
    assert read_trace(tmp_path / "spot.csv") == Trace("spot", ("a",), 1, (Occurrence(1.5, "a", "down"),), 1.5)
    with pytest.raises(NotFound, match="no trace"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="cannot be read as text"):
        read_trace(tmp_path / "binary")


def test_the_faults_of_a_training_cluster() -> None:
    """Counted in the source: 584 faults on 231 nodes, of which two began within another one of their node."""
    trace = infinitehbd()
    lost = [each for each in trace.occurrences if each.change == "down"]
    assert (trace.present, len(trace.nodes), trace.horizon_s) == (400, 400, 349 * 86_400.0)
    assert (len(lost), len({each.node for each in lost})) == (582, 231)
    assert sum("DBE" in each.kind for each in lost) == 60
    away_s = sum(each.at_s * (1 if each.change == "up" else -1) for each in trace.occurrences)
    assert away_s / trace.horizon_s == pytest.approx(9.26, abs=0.01)  # nodes, on average
