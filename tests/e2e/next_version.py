"""A copy of the program as its next version: one more field in every event and message, and all versions raised."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.e2e.kit import ROOT

PACKAGES = ("cli", "services", "shared", "simulator", "unicron", "unicron_client")

_SCHEMA = re.compile(r'    type: Literal\["([a-z.-]+)"\] = "\1"\n    schema_version: Literal\[(\d+)\] = \2\n')


def make(folder: Path) -> Path:
    """Write the copy into a new folder, which goes onto ``PYTHONPATH``; return the folder."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    added = "\\g<0>    added_later: str = 'new'\n"
    for path, line in (
        ("shared/events/base.py", "    schema_version: int"),
        ("shared/bus/messages.py", "    protocol: Annotated[int, AfterValidator(_readable)] = PROTOCOL"),
    ):
        _change(folder / path, re.escape(line) + "\n", added)
    _change(folder / "unicron/protocol/messages.py", r'    name: ClassVar\[str\] = ""\n', added)
    for path, name in (
        ("shared/bus/messages.py", "PROTOCOL"),
        ("unicron/protocol/versions.py", "VERSION"),
        ("services/planner/decide.py", "DECIDER"),
        ("shared/views/documents.py", "SCHEMA_VERSION"),
    ):
        _change(folder / path, rf"(?m)^{name} = \d+$", r"\g<0> + 1")
    _raise_schemas(folder / "shared/events")
    return folder


def _raise_schemas(events: Path) -> None:
    """Raise the schema version of every event, with a step from the version before."""
    steps = []
    for path in events.glob("*.py"):
        text = path.read_text()
        steps += _SCHEMA.findall(text)
        path.write_text(_SCHEMA.sub(lambda found: found.group().replace(found[2], str(int(found[2]) + 1)), text))
    assert len(steps) > 30
    taken = "".join(f'    ("{kind}", {version}): has_new_fields,\n' for kind, version in steps)
    _change(events / "upcast.py", r"(?m)^(STEPS: .* = \{)(.*)\}$", rf"\1\n    \2,\n{taken}}}")


def _change(path: Path, pattern: str, by: str) -> None:
    text, number = re.subn(pattern, by, path.read_text(), count=1)
    assert number == 1, (path, pattern)
    path.write_text(text)
