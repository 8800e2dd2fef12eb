"""Errors that show before a task trains that it cannot run as specified: reported as refusals, by real processes."""

from __future__ import annotations

from pathlib import Path

from tests.unicron.conftest import SpecFile
from tests.unicron.harness import Agent, agent
from tests.unicron.test_scripts import script
from unicron.protocol import Raised

AT_START = [
    ("import no_such_module", "refused", "ModuleNotFoundError", "No module named 'no_such_module'"),
    ("from os import no_such_name", "refused", "ImportError", "cannot import name 'no_such_name'"),
    ("def broken(:", "refused", "SyntaxError", "invalid syntax"),
    ("open('/no/such/file')", "refused", "FileNotFoundError", "/no/such/file"),
    ("raise ValueError('unlucky')", "exception", "ValueError", "unlucky"),
]
"""A script, and what its rank reports: kind, error, part of the detail."""

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
            assert raised.traceback.splitlines()[-1].startswith(error)
            assert a.exits[f"w{number}"][1] == 1


async def test_what_is_missing_once_training_has_begun_is_an_exception(tmp_path: Path, spec_file: SpecFile) -> None:
    async with agent(tmp_path / "run") as a:
        for number, (lines, kind) in enumerate(ONCE_JOINING):
            await a.fork(f"w{number}", spec_file(script=script(tmp_path, **lines)))
            await a.configure({f"w{number}": "initial"})
            await ended(a, number + 1)
            (raised,) = a.of(Raised, f"w{number}")
            assert raised.kind == kind, lines
