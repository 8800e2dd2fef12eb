"""``unicron replay --what-if KEY=VALUE,...``: the tables, the JSON document, and the output that the page shows.

``UNICRON_TEST_RECORD=1`` writes the page's output anew; read the difference before it is committed.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from cli.main import main
from simulator.what_if.changes import KEYS
from simulator.what_if.history_totals import Difference, TaskTotals, Totals
from simulator.what_if.notes import Parameter
from simulator.what_if.simulation import HistoryComparison
from tests.cli.conftest import Outcome
from tests.logs.kit import golden_log

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evaluation.md"
LOG = f"tests/logs/{golden_log('demo').name}"


def unicron(*arguments: str) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return Outcome(code, out.getvalue(), err.getvalue())


def page_example() -> tuple[str, str]:
    """Return the command that the page shows, and the output below it."""
    found = re.search(r"```text\n\$ unicron (replay [^\n]*--what-if [^\n]*)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1], found[2]


def test_the_page_shows_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command, shown = page_example()
    outcome = unicron(*shlex.split(command))
    assert (outcome.code, outcome.err) == (0, "")
    printed = "".join(f"{line.rstrip()}\n" for line in outcome.out.splitlines())
    if os.environ.get("UNICRON_TEST_RECORD"):
        page, before = PAGE.read_text(), f"$ unicron {command}\n"
        PAGE.write_text(page.replace(f"{before}{shown}```", f"{before}{printed}```"))
        shown = printed
    assert printed == shown


def test_lines_fit_a_terminal_and_tell_measured_from_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for columns in ("", "80"):
        monkeypatch.setenv("UNICRON_COLUMNS", columns)
        outcome = unicron("replay", LOG, "--what-if", "policy=megatron-spares,node_timeout_s=10")
        assert (outcome.code, outcome.err) == (0, "")
        lines = outcome.out.splitlines()
        assert max(len(line.rstrip()) for line in lines) <= 80
        heads = [line for line in lines if re.search(r"MEASURED +MODEL +WHAT IF +DIFFERENCE", line)]
        assert len(heads) == 3
        assert "policy: unicron; what if: megatron-spares" in lines
        assert "left out" not in outcome.out


def test_the_document_has_the_fields_that_the_page_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    outcome = unicron("replay", LOG, "--what-if", "spares=1", "--seeds", "2", "-o", "json")
    assert (outcome.code, outcome.err) == (0, "")
    document: dict[str, Any] = json.loads(outcome.out)
    assert HistoryComparison.model_validate(document).seeds == 2
    text = PAGE.read_text()
    models: list[type[BaseModel]] = [HistoryComparison, Totals, TaskTotals, Difference, Parameter]
    named = {name for model in models for name in model.model_fields}
    assert sorted(name for name in named if f"`{name}`" not in text) == []
    assert [key for key in KEYS if f"`{key}`" not in text] == []


def test_what_is_neither_a_file_nor_changes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = str(ROOT / LOG)
    outcome = unicron("replay", log, "--what-if", "what-if.yaml", "-o", "json")
    assert (outcome.code, outcome.out) == (2, "")
    assert "what-if.yaml" in json.loads(outcome.err)["detail"]
    outcome = unicron("replay", log, "--what-if", "spare=1", "-o", "json")
    assert (outcome.code, outcome.out) == (2, "")
    problem = json.loads(outcome.err)
    assert problem["errors"][0]["field"] == "spare"
    assert "did you mean spares?" in problem["detail"]
    outcome = unicron("replay", log, "--what-if", "spares=1", "--verify")
    assert (outcome.code, outcome.out) == (2, "")
