"""The rules of docs/tour.md notice a changed column, word or number; ``tests/e2e/test_tour.py`` runs its commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.tour_page import Step, captured, difference, rewritten, steps

ROOT = Path(__file__).resolve().parents[2]
TOUR = (ROOT / "docs" / "tour.md").read_text()

PAGE = """# A page

<!-- tour
vary: number time
must: running
capture: PID ^1 +(\\d+)
-->
```console
$ unicron show my-gpt
RANK  PID    STATE    SINCE
0     17     running  2026-11-23 17:00:00
1     18     running  2026-11-23 17:00:01
```

```console
$ kill -9 18
```

<!-- tour
from: ^## In
first: 2
-->
```console
$ unicron postmortem 1
## In short
over
...
```
"""

AGAIN = "RANK PID STATE SINCE\n0 2345 running 2027-01-01 01:02:03\n1 2346 running 2027-01-01 01:02:04\n"


@pytest.fixture
def table() -> Step:
    return steps(PAGE)[0]


def test_values_that_vary_are_equal_and_give_later_commands_theirs(table: Step) -> None:
    assert difference(table, AGAIN) == ""
    assert captured(table, AGAIN) == {"18": "2346"}


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("PID", "PROCESS"),
        ("running", "waiting"),
        ("STATE SINCE", "SINCE STATE"),
        ("\n1 2346", "\n1 x"),
        ("0 2345", "0"),
    ],
)
def test_a_changed_column_or_word_is_noticed(table: Step, there: str, here: str) -> None:
    assert there in AGAIN
    assert "the page has" in difference(table, AGAIN.replace(there, here))


def test_a_line_too_few_or_too_many_is_noticed(table: Step) -> None:
    assert "prints 4 lines, the page has 3" in difference(table, f"{AGAIN}2 1 running 2027-01-01 01:02:03\n")
    assert "prints 2 lines" in difference(table, AGAIN[: AGAIN.index("1 2346")])


def test_a_number_that_does_not_vary_is_noticed() -> None:
    step = Step("unicron ps", "3 workers\n", 0, 0)
    assert difference(step, "3 workers\n") == ""
    assert "the page has" in difference(step, "2 workers\n")


def test_what_must_be_there_is_looked_for_with_its_values() -> None:
    (step,) = steps("<!-- tour\nvary: number\nmust: ^3 workers\n-->\n```console\n$ unicron ps\n3 workers\n```\n")
    assert difference(step, "3 workers\n") == ""
    assert "nothing that matches" in difference(step, "2 workers\n")


def test_a_part_of_an_output_is_compared() -> None:
    step = steps(PAGE)[2]
    assert difference(step, "# Title\n\n## In short\nover\nmore\n") == ""
    assert "the page has" in difference(step, "## In short\nnot over\nmore\n")
    assert "prints 2 lines" in difference(step, "## In short\nover\n")


def test_a_recorded_page_is_as_the_run_was() -> None:
    page = rewritten(PAGE, [AGAIN, "", "## In short\nelsewhere\nmore\n"])
    assert "$ kill -9 2346\n" in page
    assert "0 2345 running 2027-01-01 01:02:03" in page
    assert "## In short\nelsewhere\n...\n" in page
    assert [step.rules for step in steps(page)] == [step.rules for step in steps(PAGE)]


def test_a_page_without_outputs_names_the_values_that_it_lacks() -> None:
    lines = ["<!-- tour", "capture: PID ^1 (\\d+)", "-->", "```console", "$ unicron show", "```", ""]
    page = "\n".join([*lines, "```console", "$ kill -9 PID", "```", ""])
    assert "$ kill -9 77\n" in rewritten(page, ["0 76\n1 77\n", ""])


def test_rules_that_nobody_knows_are_refused() -> None:
    with pytest.raises(AssertionError, match="unknown rules"):
        steps("<!-- tour\nvaries: number\n-->\n```console\n$ unicron ps\n```\n")


def test_the_tour_goes_from_the_start_to_a_what_if() -> None:
    commands = [step.command for step in steps(TOUR)]
    words = ("up", "submit", "ps", "open", "kill -9", "incidents", "postmortem", "cost", "replay", "--what-if")
    places = [next(i for i, command in enumerate(commands) if word in command) for word in words]
    assert places == sorted(places)
    assert TOUR.count("```console") == len(commands)
    assert "examples/my-gpt.yaml" in TOUR
