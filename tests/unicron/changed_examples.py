"""The repository's example scripts with a few changes, each of which has to find its place exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def changed_example(name: str, changes: Iterable[tuple[str, str]], folder: Path) -> Path:
    """Write an example with changes; return its path.

    Args:
        name: of the example's file.
        changes: old and new text of each.
        folder: where to.
    """
    text = (EXAMPLES / name).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "script.py"
    path.write_text(text)
    return path
