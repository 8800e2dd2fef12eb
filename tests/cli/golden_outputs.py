"""What verbs print at the widths that terminals have, compared with recorded ("golden") outputs.

``UNICRON_TEST_RECORD=1`` writes the golden outputs anew; read the difference before it is committed.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.cli.conftest import Outcome

GOLDEN = Path(__file__).parent / "golden"

COLUMNS = (80, 200)
"""The least that a terminal has, and a wide window."""


def golden_files(name: str) -> list[Path]:
    """Return the files of one output, one for each width."""
    return [GOLDEN / f"{name}-{columns}.txt" for columns in COLUMNS]


def compare(name: str, columns: int, shown: Outcome, *, prose: bool = False, code: int = 0) -> None:
    """Compare an output with the recorded one.

    Args:
        name: of the recorded output.
        columns: width of the terminal.
        shown: what the verb gave.
        prose: it has paragraphs, in which a terminal breaks the lines. Lines of anything else fit.
        code: exit status that the verb must have.
    """
    assert shown.code == code, shown.err
    tables = [line for line in shown.out.splitlines() if "  " in line.strip()]
    assert prose or [line for line in tables if len(line.rstrip()) > columns] == []
    golden = GOLDEN / f"{name}-{columns}.txt"
    # With what it says on standard error, which has no table.
    text = "".join(f"{line.rstrip()}\n" for line in (shown.out + shown.err).splitlines())
    if os.environ.get("UNICRON_TEST_RECORD"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text(), name
