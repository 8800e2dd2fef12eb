"""THIRD-PARTY-NOTICES.md names what runs, in the versions of constraints.txt."""

import re

from deploy.publish import notices

ROWS = dict(re.findall(r"^\| ([a-z\d-]+) \| (\d\S*) \| [^|]+ \| [^|]* \|$", notices.FILE.read_text(), re.MULTILINE))


def test_the_versions_are_those_of_the_constraints() -> None:
    lines = (notices.ROOT / "constraints.txt").read_text().splitlines()
    exact = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert ROWS == {name: exact.get(name) for name in ROWS}, "make notices"


def test_all_that_runs_has_a_row() -> None:
    assert not notices.needed(notices.runtime_requirements()) - ROWS.keys(), "make notices"


def test_tools_are_left_out() -> None:
    assert ROWS.keys().isdisjoint({"pytest", "mypy", "ruff", "moto", "pip-audit"})


def test_what_is_part_of_the_repository_is_named_with_its_version_and_licence() -> None:
    folder = notices.ROOT / "services" / "api" / "page"
    version = re.search(r"\(v([\d.]+)\)", (folder / "uPlot.iife.min.js").read_text()[:200])
    assert version is not None
    assert f"uPlot {version[1]}," in notices.TAIL
    assert notices.FILE.read_text().startswith(notices.HEAD), "make notices"
    assert notices.FILE.read_text().endswith(notices.TAIL), "make notices"
    assert "MIT" in (folder / "uPlot.LICENSE").read_text()
