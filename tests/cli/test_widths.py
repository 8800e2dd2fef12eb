"""Tables at the widths that people have: golden outputs at 80 and 200 columns, and what is left out.

``UNICRON_TEST_RECORD=1`` writes the golden outputs anew; read the difference before it is committed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.main import VERBS as VERBS_OF_THE_COMMAND
from cli.main import load, main
from cli.output import distinct_beginnings, number, print_table, too_wide
from tests.api.kit import Server
from tests.cli.conftest import call_unicron

GOLDEN = Path(__file__).parent / "golden"

VERBS = {
    "ps": ("ps",),
    "nodes": ("nodes",),
    "incidents": ("incidents",),
    "plan-list": ("plan", "list"),
    "cost": ("cost", "--to", "2025-03-01T12:10", "--by", "task"),
    "show": ("show", "gpt"),
    "incidents-show": ("incidents", "show", "i"),
    "plan-show": ("plan", "show", "p"),
    "events": ("events", "--last", "4"),
    "wait": ("wait", "gpt", "--for", "running"),
}

PROSE = {"incidents-show", "plan-show"}
"""Have paragraphs, in which a terminal breaks the lines."""


@pytest.mark.parametrize("columns", [80, 200])
async def test_tables_fit_the_width(healed: Server, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_COLUMNS", str(columns))
    for name, arguments in VERBS.items():
        shown = await call_unicron(*arguments, server=healed.url)
        assert (shown.code, shown.err) == (0, "")
        tables = [line for line in shown.out.splitlines() if "  " in line.strip()]
        assert name in PROSE or [line for line in tables if len(line.rstrip()) > columns] == []
        golden = GOLDEN / f"{name}-{columns}.txt"
        text = "\n".join(line.rstrip() for line in shown.out.splitlines()) + "\n"
        if os.environ.get("UNICRON_TEST_RECORD"):
            golden.parent.mkdir(exist_ok=True)
            golden.write_text(text)
        assert text == golden.read_text(), name


async def test_wide_has_every_column(healed: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_COLUMNS", "80")
    for arguments in VERBS.values():
        narrow = await call_unicron(*arguments, server=healed.url)
        wide = await call_unicron(*arguments, "-o", "wide", server=healed.url)
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
        assert main([verb, *([name] if name else []), "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if len(line) > 80 or "…" in line] == []


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
