"""Log lines: text for people, JSON for collectors, with the ids of what they are about."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidInput
from shared.service.log_lines import FORMAT, JsonLines, concerning, formatter, ids
from shared.settings.model import read_settings
from tests.shared.samples import node_joined

ROOT = Path(__file__).parents[2]


def record(message: str = "a %s", *arguments: object, **extra: str) -> logging.LogRecord:
    return logging.getLogger("part").makeRecord("part", logging.WARNING, "f", 1, message, arguments, None, extra=extra)


def line(one: logging.LogRecord) -> dict[str, Any]:
    text = JsonLines("agent-n0", {"node": "n0"}).format(one)
    assert "\n" not in text
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_a_line_of_json_has_its_place_and_its_ids() -> None:
    found = line(record("a %s", "b", task="gpt", incident="i1"))
    at = datetime.fromisoformat(found.pop("time"))
    assert abs((datetime.now(UTC) - at).total_seconds()) < 60.0
    assert found == {
        "level": "warning",
        "service": "agent-n0",
        "pid": os.getpid(),
        "logger": "part",
        "message": "a b",
        "node": "n0",
        "task": "gpt",
        "incident": "i1",
    }


def test_an_exception_is_in_its_line() -> None:
    one = record("failed")
    try:
        raise ZeroDivisionError("oh")
    except ZeroDivisionError:
        one.exc_info = sys.exc_info()
    assert line(one)["error"].endswith("ZeroDivisionError: oh")


@given(st.text(), st.text())
def test_whatever_a_line_says_it_is_one_object_in_ascii(message: str, task: str) -> None:
    one = record("%s", message)
    one.task = task
    text = JsonLines("api", {}).format(one)
    assert text.isascii()
    assert "\n" not in text
    assert json.loads(text)["message"] == message


def test_ids_are_those_that_things_have() -> None:
    event = node_joined(1)
    assert ids(event) == {"node": event.node}
    assert ids(event, incident="i1", task=None, node="n9") == {"node": "n9", "incident": "i1"}


async def test_the_lines_of_a_block_concern_its_ids_and_so_do_those_of_its_tasks() -> None:
    async def inner() -> dict[str, Any]:
        with concerning({"plan": "p1"}):
            return line(record())

    with concerning({"task": "gpt"}):
        found = await asyncio.create_task(inner())
        assert "plan" not in line(record())
    assert (found["task"], found["plan"]) == ("gpt", "p1")
    assert "task" not in line(record())


def test_text_is_the_default() -> None:
    text = formatter("api", "", {}).format(record("a %s", "b", task="gpt"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING api\[\d+\] part: a b", text)


def test_another_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORMAT, "xml")
    with pytest.raises(InvalidInput, match=r"log_format.*'text' or 'json'"):
        read_settings()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["services.api.main", "services.agent.main"])
def test_a_program_that_does_not_start_says_so_in_its_format(program: str, tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}
    variables |= {"PYTHONPATH": str(ROOT), FORMAT: "json", "UNICRON_NODE": "n0", "UNICRON_RUN_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-P", "-m", program], env=variables, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 2
    lines = [json.loads(text) for text in ended.stderr.splitlines()]
    assert "nats_credential" in lines[-1]["message"]
    assert lines[-1].get("node") == ("n0" if program.startswith("services.agent") else None)
