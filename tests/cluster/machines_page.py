"""The commands of docs/deploy/machines.md, which the tests run as they are there."""

from __future__ import annotations

import re

from tests.cluster.network import ROOT

SECTION = "## From nothing to a healed fault"


def commands() -> list[str]:
    """Return every command of the section."""
    text = (ROOT / "docs" / "deploy" / "machines.md").read_text()
    section = text.split(f"{SECTION}\n")[1].split("\n## ")[0]
    return re.findall(r"^    (.+)$", section, re.MULTILINE)


class MachinesPage:
    """The commands of the page, in their order, each of which is to be taken once."""

    def __init__(self) -> None:
        self._left = commands()

    @property
    def left(self) -> list[str]:
        """What has not been taken."""
        return list(self._left)

    def take(self, number: int = 1, first: str = "") -> list[str]:
        """Return the next commands.

        Args:
            number: how many.
            first: what the first of them begins with.
        """
        taken, self._left = self._left[:number], self._left[number:]
        assert taken, "the page has no more commands"
        assert taken[0].startswith(first), taken[0]
        return taken

    def one(self, first: str) -> str:
        """Return the next command, which begins with ``first``."""
        return self.take(1, first)[0]
