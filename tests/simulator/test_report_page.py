"""Pictures and the page: what is in them, and that nothing is from elsewhere."""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from shared.costs.ledger import CATEGORIES
from shared.errors import Unavailable
from shared.events.plans import Problem, Solution
from shared.events.severities import ErrorKind
from simulator.outcome import Outcome
from simulator.policy import Course, Policy, Recovery
from simulator.report.page import Material, page
from simulator.report.plots import KIND_COLOURS, check_installed, draw
from simulator.report.summary import compare
from tests.simulator.report_kit import outcome, trace, workload

VOID = {"meta", "br", "img", "link", "hr"}
NAMES = ("megatron", "unicron", "oracle")


class Reader(HTMLParser):
    """The structure of a page; a tag that is closed out of order is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.references: list[str] = []
        self.tags: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids[value or ""] += 1
            elif name in {"href", "src", "xlink:href", "data"}:
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


class Instant:
    """A system that needs no time."""

    checkpoint_every_s = 1800.0

    def detection_s(self, kind: ErrorKind, step_s: float, micro_batches: int = 1) -> float:
        return 0.0

    def course(self, recovery: Recovery) -> Course:
        return Course(0.0)


def runs(seeds: int) -> dict[str, list[Outcome]]:
    return {name: [outcome(name, seed, rate=1e15 + seed) for seed in range(seeds)] for name in NAMES}


def material(*, seeds: int = 2, endless: bool = True) -> Material:
    made = runs(seeds)
    if not endless:
        made = {name: [outcome(name, completed_s={"gpt-a": 4080.0})] for name in NAMES[:2]}
    known = {"unicron": Policy("unicron", "Unicron", "a <paper>", "cluster", Instant(), _never, assumptions=("a & b",))}
    return Material(
        compare("small", made, 1.0, endless=endless),
        workload(endless=endless),
        {name: of[0] for name, of in made.items()},
        known,
        "unicron simulate --trace 'a file.csv'",
    )


@functools.cache
def usual_page() -> str:
    """Return the page of the usual material, whose pictures take half a second."""
    return page(material())


def _never(problem: Problem) -> tuple[Solution, list[Solution]]:
    raise AssertionError("a page decides nothing")


def test_the_page_is_well_formed_and_nothing_is_from_elsewhere() -> None:
    text = usual_page()
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert [name for name, times in reader.ids.items() if times > 1] == []
    assert reader.tags["svg"] == 4
    assert reader.tags["script"] == reader.tags["link"] == reader.tags["img"] == 0
    assert {each[0] for each in reader.references} == {"#"}
    assert {each[1:] for each in reader.references} <= reader.ids.keys()
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= reader.ids.keys()
    assert "@import" not in text
    assert not re.findall(r"url\((?!#)", text)


def test_what_comes_from_files_is_escaped() -> None:
    text = usual_page()
    assert "drawn &lt;by hand&gt;" in text
    assert "a &lt;paper&gt;" in text
    assert "<li>a &amp; b</li>" in text
    assert "unicron simulate --trace &#x27;a file.csv&#x27;" in text


def test_several_seeds_are_said_to_be_means() -> None:
    assert "2 seeds" in usual_page()
    assert "for the first seed" in usual_page()
    assert "first seed" not in page(material(seeds=1))


def test_where_tasks_end_completion_times_are_shown() -> None:
    text = page(material(endless=False))
    assert "Completion times" in text
    assert "68 min" in text
    assert "Completion times" not in usual_page()


@pytest.mark.parametrize("file_format", ["svg", pytest.param("png", marks=pytest.mark.slow)])
def test_equal_data_give_equal_pictures(file_format: str) -> None:
    def drawn() -> dict[str, bytes]:
        made = runs(1)
        lines = compare("small", made, 1.0, endless=True).policies
        return draw(trace(), {name: of[0] for name, of in made.items()}, lines, file_format)  # type: ignore[arg-type]

    pictures = drawn()
    assert pictures.keys() == {"trace", "waf", "accumulated-waf", "cost"}
    assert pictures == drawn()


def test_every_policy_and_every_kind_of_time_is_in_the_pictures() -> None:
    made = runs(1)
    lines = compare("small", made, 1.0, endless=True).policies
    pictures = draw(trace(), {name: of[0] for name, of in made.items()}, lines, "svg")
    words = {name: "".join(ElementTree.fromstring(picture).itertext()) for name, picture in pictures.items()}
    for name in NAMES:
        assert name in words["waf"]
        assert name in words["accumulated-waf"]
    assert "oracle" not in words["cost"], "it accounts for no worker"
    for kind in ("useful", "lost", "detection", "transition incident"):
        assert kind in words["cost"]
    assert {"n0", "n1", "n2"} <= set(words["trace"].split())


def test_every_kind_of_time_has_a_colour() -> None:
    assert KIND_COLOURS.keys() == set(CATEGORIES.values())


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unavailable, match=r"unicron-cluster\[plots\]"):
        check_installed()
