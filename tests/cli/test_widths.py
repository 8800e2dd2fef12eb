"""Tables at the widths that people have: golden outputs (``golden_outputs``), and what is left out."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from contextlib import redirect_stdout
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.main import VERBS as VERBS_OF_THE_COMMAND
from cli.main import load, main
from cli.output import _print_columns, _print_folded, distinct_beginnings, number, print_table, too_wide
from shared.bus.connection import Bus
from tests.api.kit import START, Server
from tests.cli.conftest import call_unicron
from tests.cli.golden_outputs import COLUMNS, compare
from tests.cli.test_limits import detector

VERBS = {
    "ps": ("ps",),
    "status": ("status",),
    "nodes": ("nodes",),
    "nodes-detector": ("nodes", "--detector"),
    "incidents": ("incidents",),
    "plan-list": ("plan", "list"),
    "cost": ("cost", "--to", "2025-03-01T12:10", "--by", "task"),
    "show": ("show", "gpt"),
    "incidents-show": ("incidents", "show", "i"),
    "plan-show": ("plan", "show", "p"),
    "events": ("events", "--last", "4"),
    "wait": ("wait", "gpt", "--for", "running"),
    "logs": ("logs", "gpt"),
    "postmortem": ("postmortem", "i"),
    "export-incidents": ("export", "incidents"),
    "export-plans": ("export", "plans"),
}
"""Name of the golden outputs -> the verb that only reads, and its arguments; those of the other verbs are in
``test_every_verb``."""

CODES = {"status": 1}
"""Exit status of the verbs that find something: not all services run beside this server."""

PROSE = {"incidents-show", "plan-show", "postmortem"}
"""Have paragraphs, in which a terminal breaks the lines."""

WITHOUT_WIDE = {"export", "postmortem"}
"""Write files: their ``-o`` is the format of the file."""

PRINTED = {"n0-0": "step 1 loss 2.5\nstep 2 loss 2.25\n", "n0-1": "ready\n", "n1-0": "", "n1-1": "ready\n"}
"""Worker -> what it has printed."""


@pytest.fixture
async def whole(healed: Server, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The same with a detector that answers, and with the output of the ranks."""
    await detector(bus, unknown=())
    # A post-mortem says of when it is.
    monkeypatch.setattr("services.api.routers.incidents.utc_now", lambda: START + timedelta(minutes=10))
    output = healed.data.parent / "tasks" / "gpt" / "output"
    output.mkdir(parents=True)
    for worker, printed in PRINTED.items():
        (output / f"1-{worker}.log").write_text(printed)
    return healed


@pytest.mark.parametrize("columns", COLUMNS)
async def test_tables_fit_the_width(whole: Server, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_COLUMNS", str(columns))
    for name, arguments in VERBS.items():
        compare(
            name,
            columns,
            await call_unicron(*arguments, server=whole.url),
            prose=name in PROSE,
            code=CODES.get(name, 0),
        )


async def test_wide_has_every_column(whole: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_COLUMNS", "80")
    for arguments in (found for found in VERBS.values() if found[0] not in WITHOUT_WIDE):
        narrow = await call_unicron(*arguments, server=whole.url)
        wide = await call_unicron(*arguments, "-o", "wide", server=whole.url)
        assert "left out" not in wide.out
        for line in narrow.out.splitlines():
            if line.startswith("left out: "):
                names = line.removeprefix("left out: ").partition(" (")[0].split(", ")
                assert [name for name in names if name not in wide.out] == []


@pytest.mark.parametrize("verb", VERBS_OF_THE_COMMAND)
def test_help_fits_80_columns_and_cuts_no_option(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("", *getattr(load(verb), "commands", {})):
        assert main([verb, *([name] if name else []), "-h"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if len(line) > 80 or "…" in line] == []
        prose = map(str.strip, itertools.takewhile(lambda line: not line.startswith(("╭", "Options:")), lines))
        for line, following in itertools.pairwise(prose):  # broken where the terminal ends, and nowhere else
            assert not (line and following) or len(f"{line} {following.split()[0]}") > 78, line


def test_ids_are_cut_before_a_column_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(f"5ab2a0c7{i}-8d3c-0f3b62c3e1aa-77ab", "reconfigure", "5e43-77ab-8d3c-0f3b62c3e1aa") for i in range(2)]
    columns = ("PLAN", "RESPONSE", "INCIDENT")
    for width, shown in ((32, ["5ab2a0c70", "reconfigure", "5e43-77a"]), (100, list(rows[0]))):
        monkeypatch.setenv("UNICRON_COLUMNS", str(width))
        print_table(columns, rows, least=("RESPONSE",), ids=("PLAN", "INCIDENT"))
        assert capsys.readouterr().out.splitlines()[1].split() == shown


@given(st.lists(st.text("ab-", max_size=20), max_size=8))
def test_beginnings_tell_ids_apart(ids: list[str]) -> None:
    cut = distinct_beginnings(ids)
    assert all(one.startswith(short) for one, short in zip(ids, cut, strict=True))
    assert len(set(cut)) == len(set(ids))


@given(st.data())
def test_no_more_is_left_out_than_has_to_be(data: st.DataObject) -> None:
    columns = [f"COLUMN{i}" for i in range(data.draw(st.integers(1, 6)))]
    texts = st.text("ab", max_size=30)
    cells = data.draw(st.lists(st.lists(texts, min_size=len(columns), max_size=len(columns)), min_size=1, max_size=4))
    least = data.draw(st.permutations(columns[:-1]))
    width = data.draw(st.integers(10, 200))
    left_out = too_wide(columns, cells, least, width)
    assert left_out == list(least[: len(left_out)])
    assert columns[-1] not in left_out
    if left_out:
        assert too_wide(columns, cells, least[: len(left_out) - 1], width) == left_out[:-1]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.12345, "0.1235"),
        (12345.6, "12346"),
        (999999.4, "999999"),
        (1.175e11, "117.5G"),
        (-2.5e6, "-2.5M"),
        (9e27, "9R"),
    ],
)
def test_large_numbers_have_si_prefixes(value: float, shown: str) -> None:
    assert number(value) == shown


def test_what_says_nothing_is_left_out_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ("NAME", "STATE", "STEP", "WORKERS", "LOSS", "REASON")
    rows: list[tuple[object, ...]] = [("gpt-large", "running", "95/100", 4, None, "")]
    monkeypatch.setenv("UNICRON_COLUMNS", "40")
    print_table(columns, rows, least=("WORKERS",))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "NAME       STATE    STEP    WORKERS",
        "gpt-large  running  95/100  4",
        "left out: LOSS, REASON (-o wide has all)",
    ]
    monkeypatch.setenv("UNICRON_COLUMNS", "80")
    print_table(columns, rows, least=("WORKERS",))
    assert capsys.readouterr().out.splitlines()[0].split() == list(columns)


@given(st.lists(st.tuples(*[st.text("aé字 -", max_size=9).map(str.strip)] * 3), min_size=1, max_size=5))
def test_short_tables_are_as_those_whose_cells_are_folded(rows: list[tuple[str, ...]]) -> None:
    columns, shown = ("A", "NUMBER", "LAST"), []
    for folded in (False, True):
        out = io.StringIO()
        with redirect_stdout(out):
            if folded:
                _print_folded(columns, rows, wide=True)
            else:
                _print_columns(columns, rows, 80, wide=True)
        shown.append([line.rstrip() for line in out.getvalue().splitlines()])
    assert shown[0] == shown[1]


def test_a_long_table_waits_for_no_layout() -> None:
    code = (
        "import sys; from cli.output import print_table;"
        "print_table(('A', 'B'), [('a', i) for i in range(1000)]);"
        "print([m for m in ('rich.console', 'rich.table') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert (done.stderr.strip(), len(done.stdout.splitlines())) == ("[]", 1001)
