"""The live page's modules are readable: with a mistake in one of them the whole page stays empty."""

from __future__ import annotations

import subprocess
from pathlib import Path

PAGE = Path(__file__).parents[2] / "services" / "api" / "page"
MODULES = sorted(path for path in PAGE.glob("*.js") if not path.name.endswith(".min.js"))


CHECK = """
for (const file of process.argv.slice(1)) {
  try {
    new (require("vm").SourceTextModule)(require("fs").readFileSync(file, "utf8"), { identifier: file });
  } catch (error) {
    console.log(`${file}: ${error.message}`);
  }
}
"""
"""Prints the errors of syntax of all modules, which are not run."""


def test_no_module_of_the_page_has_an_error_of_syntax(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.js"
    wrong.write_text("import { a } from './a.js';\nconst b = ;\n")
    command: list[str | Path] = ["node", "--no-warnings", "--experimental-vm-modules", "-e", CHECK, *MODULES]
    assert MODULES
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == ""
    found = subprocess.run([*command, wrong], capture_output=True, text=True, timeout=60, check=True).stdout
    assert found == f"{wrong}: Unexpected token ';'\n"
