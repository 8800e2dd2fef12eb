"""The commands of docs/deploy/compose.md's walk through docker-compose.yml, which the tests run as they are there."""

from __future__ import annotations

import re
import shlex

from tests.containers.compose import Project
from tests.containers.images import ROOT

HEADING = "## From nothing to a healed fault"


def commands() -> list[str]:
    """Return every use of compose in the section, without comments and without the rest of its pipe."""
    text = (ROOT / "docs" / "deploy" / "compose.md").read_text()
    section = text.split(f"{HEADING}\n")[1].split("\n## ")[0]
    return [line.strip() for line in re.findall(r"^    .*?(docker compose [^#|\n]+)", section, re.MULTILINE)]


class Page:
    """Runs commands of the page, and knows which of them have been run.

    Args:
        project: in which they are run.
    """

    def __init__(self, project: Project) -> None:
        self._project = project
        self.left = commands()

    def take(self, command: str) -> None:
        """Note that a command of the page was carried out otherwise."""
        self.left.remove(command)

    def run(self, command: str, stdin: str | None = None, **values: object) -> str:
        """Run a command of the page, with values for the words in capitals; return what it printed."""
        self.take(command)
        for name, value in values.items():
            command = command.replace(name, str(value))
        _, _, verb, *rest = shlex.split(command)
        # There is no terminal here.
        terminal = ["-T"] if verb == "exec" and "-T" not in rest else []
        return self._project.run(verb, *terminal, *rest, stdin=stdin)
