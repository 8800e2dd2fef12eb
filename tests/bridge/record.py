"""Record names and parameters of every seam of a checkout of megatron-bridge: ``python -m tests.bridge.record``.

The environment variable ``UNICRON_BRIDGE`` names a folder that has ``megatron/bridge``. The record has an entry for
each release; what the record is for: ``tests.megatron_lm.record``.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tests.megatron_lm.record import parameters_in
from unicron.bridge.seams import SEAMS
from unicron.megatron_lm.seams import Seam

RECORD = Path(__file__).with_name("seams.json")


def version_of(folder: Path) -> str:
    """Return the version of megatron-bridge in a folder."""
    text = (folder / "megatron/bridge/package_info.py").read_text()
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))


def of_folder(folder: Path) -> dict[str, list[str] | None]:
    """Return the parameters of all seams, by ``key``; None: there is no such one."""
    return {key(seam): parameters(seam, folder) for seam in SEAMS}


def key(seam: Seam) -> str:
    """Return the name of a seam in the record: some names are in several modules."""
    return f"{seam.module}.{seam.name}"


def parameters(seam: Seam, folder: Path) -> list[str] | None:
    """Return the parameters of a seam, which its module may have from another one."""
    module, name = seam.module, seam.name
    while True:
        file = _file(module, folder)
        tree = ast.parse(file.read_text())
        head = name.partition(".")[0]
        imported = dict(_imports(tree, module if file.name == "__init__.py" else module.rpartition(".")[0]))
        if head not in imported:
            return parameters_in(tree, name)
        module, there = imported[head]
        name = there + name[len(head) :]
        if not there:  # a module itself
            name = name.lstrip(".")


def _imports(tree: ast.Module, package: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield what a module has from others: the name here, and module and name there; a module has no name there."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, node.module])
            for alias in node.names:
                here = alias.asname or alias.name
                whole = alias.name == "flop_utils"
                yield here, (f"{origin}.{alias.name}", "") if whole else (origin, alias.name)


def _file(module: str, folder: Path) -> Path:
    """Return the file of a module: of megatron-bridge in the folder, of megatron-core where it is installed."""
    path = module.replace(".", "/")
    if module.startswith("megatron.core"):
        core = find_spec("megatron.core")
        assert core is not None
        assert core.origin is not None
        root = Path(core.origin).parents[2]
    else:
        root = folder
    found = root / f"{path}.py"
    return found if found.exists() else root / path / "__init__.py"


if __name__ == "__main__":
    folder = Path(os.environ["UNICRON_BRIDGE"])
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.write_text(json.dumps(known | {version_of(folder): of_folder(folder)}, indent=1) + "\n")
