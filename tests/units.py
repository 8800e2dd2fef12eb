"""The systemd units of deploy/systemd, read as systemd reads them as far as these units need it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))

END_SIGNAL = "SIGTERM"
"""systemd's default of KillSignal."""


@dataclass
class Unit:
    """A unit's directives: ``(section, directive)`` -> its values, in order.

    ``name``: of the file, without its suffix.
    """

    name: str
    directives: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))

    def all(self, directive: str, section: str = "Service") -> list[str]:
        """Return the values of a directive."""
        return self.directives.get((section, directive), [])

    def one(self, directive: str, default: str = "") -> str:
        """Return the last value of a directive of the service."""
        return (self.all(directive) or [default])[-1]

    def words(self, directive: str) -> list[str]:
        """Return the words of all values of a directive."""
        return [word for value in self.all(directive) for word in value.split()]

    def add(self, text: str) -> None:
        """Add the directives of a file: the unit's, or one beside it.

        Raises:
            ValueError: a line is none of a unit.
        """
        section = ""
        for line in text.splitlines():
            if not line or line.startswith(("#", ";")):
                continue
            if line.startswith("[") and line.endswith("]"):
                section = line[1:-1]
                continue
            directive, equals, value = line.partition("=")
            if not section or not equals or not directive.isalnum() or value != value.strip():
                raise ValueError(f"{self.name}: {line!r} is no directive")
            self.directives[section, directive].append(value)


def read(path: Path) -> Unit:
    """Return the unit in a file, with the files of its folder ``.d``."""
    unit = Unit(path.stem)
    unit.add(path.read_text())
    for more in sorted(path.with_name(f"{path.name}.d").glob("*.conf")):
        unit.add(more.read_text())
    return unit
