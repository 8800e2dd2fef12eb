"""The live page's modules are readable: with a mistake in one of them the whole page stays empty."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "services" / "api" / "page"
MODULES = sorted(path for path in PAGE.glob("*.js") if not path.name.endswith(".min.js"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_a_module_of_the_page_has_no_error_of_syntax(module: Path) -> None:
    done = subprocess.run(
        ["node", "--input-type=module", "--check"],
        input=module.read_text(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
