"""Errors that show before a task trains that it cannot run as specified: reported as refusals, by real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unicron.conftest import SpecFile
from tests.unicron.harness import Agent, agent
from tests.unicron.test_scripts import script
from unicron.protocol.messages import Raised

CHAINED = """
try:
    compile(open(__file__.replace("script-7.py", "script-0.py")).read(), "config", "exec")
except SyntaxError as err:
    raise ExceptionGroup("several", [RuntimeError("no configuration"), err])
"""

ATTACH = "import unicron; unicron.attach(steps=6, micro_batches=12, build=lambda tensor, pipeline: None)"

AT_START = [
    ("import no_such_module", "refused", "ModuleNotFoundError", "No module named 'no_such_module'"),
    ("from os import no_such_name", "refused", "ImportError", "cannot import name 'no_such_name'"),
    ("def broken(:", "refused", "SyntaxError", "invalid syntax"),
    ("open('/no/such/file')", "refused", "FileNotFoundError", "/no/such/file"),
    ("raise ValueError('unlucky')", "exception", "ValueError", "unlucky"),
    ("import torch.distributed as dist; dist.init_process_group('gloo')", "refused", "WrongLoop", "delete the call"),
    (f"{ATTACH}.model", "refused", "WrongLoop", "the first step of run.steps()"),
    (f"{ATTACH}.generation", "refused", "WrongLoop", "the first step of run.steps()"),
]
"""A script, and what its rank reports: kind, error, part of the detail."""

NOT_PYTHON = [
    "root:x:hunter2:/root:/bin/sh",
    "hunter2 = 'a string without an end",
    "key: hunter2: other",
    "  hunter2 = 1",
    "print 'hunter2'",
    "hunter2\u00a0= 1",
    "if True:\n\thunter2 = 1\n        hunter2 = 2",
    CHAINED,
]
"""Files that are named as a script by mistake, and one that reads another one."""

ONCE_JOINING = [
    ({"model": "__import__('no_such_module')"}, "refused"),  # in ``build``
    ({"model": "{'model': model}"}, "refused"),  # UnsupportedModel
    ({"begin": "__import__('no_such_module')"}, "exception"),  # in a step
    ({"after": "open('/no/such/file')"}, "exception"),  # between two steps
]
"""Lines of the loop of ``test_scripts``, and the kind that its rank reports."""


async def ended(a: Agent, count: int) -> None:
    """Wait until this many processes have ended."""
    await a.until(lambda: len(a.exits) == count)


async def test_a_script_that_cannot_start_is_refused(tmp_path: Path, spec_file: SpecFile) -> None:
    async with agent(tmp_path / "run") as a:
        for number, (text, *_) in enumerate(AT_START):
            path = tmp_path / f"script-{number}.py"
            path.write_text(f"{text}\n")
            await a.fork(f"w{number}", spec_file(script=str(path)).rename(path.with_suffix(".json")))
        await ended(a, len(AT_START))
        for number, (_, kind, error, detail) in enumerate(AT_START):
            (raised,) = a.of(Raised, f"w{number}")
            assert (raised.kind, raised.error, raised.generation) == (kind, error, 0)
            assert detail in raised.detail
            assert raised.traceback.splitlines()[-1].startswith((error, f"unicron.errors.{error}"))
            assert a.exits[f"w{number}"][1] == 1


@pytest.mark.slow
async def test_no_line_of_a_file_that_is_no_python_is_in_an_error(tmp_path: Path, spec_file: SpecFile) -> None:
    """It may be a file with a password. What is said and printed of a task is for everybody who may read."""
    async with agent(tmp_path / "run") as a:
        for number, text in enumerate(NOT_PYTHON):
            path = tmp_path / f"script-{number}.py"
            path.write_text(text)
            await a.fork(f"w{number}", spec_file(script=str(path)).rename(path.with_suffix(".json")))
        await ended(a, len(NOT_PYTHON))
        for number in range(len(NOT_PYTHON)):
            (raised,) = a.of(Raised, f"w{number}")
            assert "Error" in raised.traceback
            assert "Error" in (tmp_path / "run" / f"w{number}.log").read_text()
        assert "hunter2" not in str([*a.messages, *a.events])
        for log in (tmp_path / "run").glob("*.log"):
            assert "hunter2" not in log.read_text(), log.name


@pytest.mark.slow
async def test_what_is_missing_once_training_has_begun_is_an_exception(tmp_path: Path, spec_file: SpecFile) -> None:
    async with agent(tmp_path / "run") as a:
        for number, (lines, kind) in enumerate(ONCE_JOINING):
            await a.fork(f"w{number}", spec_file(script=script(tmp_path, **lines)))
            await a.configure({f"w{number}": "initial"})
            await ended(a, number + 1)
            (raised,) = a.of(Raised, f"w{number}")
            assert raised.kind == kind, lines
