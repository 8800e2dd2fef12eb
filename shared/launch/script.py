"""What a training script is, by its text: whose loop it runs, and with which megatron-core."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple


class Loop(StrEnum):
    """Whose training loop a script runs."""

    MEGATRON_LM = "megatron-lm"
    LIBRARY = "unicron"
    BRIDGE = "megatron-bridge"
    OTHER = "other"


VERSIONS = ((0, 16), (0, 19))
"""The first and the last release of megatron-core whose ``pretrain`` is supported."""

_UPSTREAM = re.compile(r"^pretrain_(gpt|mamba|hybrid|t5|bert|ict|retro|vlm|vision_\w+)\.py$")
"""Scripts of Megatron-LM's repository that call its ``pretrain``."""

_PRETRAIN = frozenset({"megatron.training", "megatron.training.training"})


class Script(NamedTuple):
    """What is known of a script.

    ``path``: its file; None: it was not found, or is a program. ``loop``: whose loop it runs. ``why``: from what that
    is known, a sentence's end. ``core``: version of megatron-core beside it, or installed; empty: not known. ``text``:
    its source; empty: it was not read.
    """

    path: Path | None
    loop: Loop
    why: str
    core: str = ""
    text: str = ""

    @property
    def core_in_range(self) -> bool:
        """Whether megatron-core is one whose ``pretrain`` is supported, or is not known."""
        numbers = re.match(r"(\d+)\.(\d+)", self.core)
        return numbers is None or VERSIONS[0] <= (int(numbers[1]), int(numbers[2])) <= VERSIONS[1]


def loop_of(text: str) -> tuple[Loop, str]:
    """Return whose loop a script with this text runs, and from what that is known.

    The last import of a name counts, as in Python: a fork that imports a ``pretrain`` of its own behind Megatron's runs
    its own.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return Loop.OTHER, "cannot be read as Python"
    imported = [*_imports(tree)]
    modules = {module for module, _ in imported}
    if any(_within(module, "unicron") for module in modules):
        return Loop.LIBRARY, "imports unicron"
    if any(_within(module, "deepspeed") for module in modules):
        return Loop.OTHER, "uses DeepSpeed, whose engine owns the step"
    if any(_within(module, "megatron.bridge") for module in modules):
        return Loop.BRIDGE, "uses megatron-bridge"
    if any(module == "megatron" and name == "get_args" for module, name in imported):
        return Loop.OTHER, "uses a Megatron-LM without megatron.core's training module, or a fork of one"
    origin = next((module for module, name in reversed(imported) if name == "pretrain"), "")
    if origin in _PRETRAIN:
        return Loop.MEGATRON_LM, f"calls pretrain of {origin}"
    if origin:
        return Loop.OTHER, f"calls pretrain of {origin}, not Megatron-LM's"
    if "runpy" in modules and (wrapped := _upstream_named(tree)):
        return Loop.MEGATRON_LM, f"runs Megatron-LM's {wrapped}"
    return Loop.OTHER, "has a loop of its own"


def read_script(name: str, module: str, folders: Iterable[Path], installed: Callable[[], str]) -> Script:
    """Return what is known of a script or module.

    Args:
        name: the script's path, taken from the first of ``folders``; empty: it is a module.
        module: the module's name; empty: it is a script.
        folders: where modules are looked for: the working directory, and those of PYTHONPATH.
        installed: returns the version of megatron-core that is installed, or nothing.
    """
    places = [*folders]
    path = _module_file(module, places) if module else places[0] / name
    if path is None or not path.is_file():
        last = name.rpartition("/")[2]
        known = bool(_UPSTREAM.match(last))
        loop = Loop.MEGATRON_LM if known else Loop.OTHER
        why = "is not here; by its name it is Megatron-LM's" if known else "is not here, or no Python script"
        return Script(None, loop, why, installed() if known else "")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return Script(path, Loop.OTHER, "cannot be read as Python")
    loop, why = loop_of(text)
    core = ""
    if loop is Loop.MEGATRON_LM:
        core = core_of([*path.resolve().parents, *places]) or installed()
    return Script(path, loop, why, core, text)


def core_of(folders: Iterable[Path]) -> str:
    """Return the version of megatron-core in the first of some folders that has it; empty: none has."""
    for folder in folders:
        try:
            text = (folder / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        numbers = [re.search(rf"^{part}\s*=\s*(\d+)", text, re.MULTILINE) for part in ("MAJOR", "MINOR", "PATCH")]
        if all(numbers):
            return ".".join(number[1] for number in numbers if number)
    return ""


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield module and name of everything that is imported, in the order of the text; a whole module has no name."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(nodes, key=lambda node: node.lineno):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif node.module and not node.level:
            yield from ((node.module, alias.asname or alias.name) for alias in node.names)


def _upstream_named(tree: ast.Module) -> str:
    """Return the script of Megatron-LM that a wrapper names, as its ``pretrain_mamba.py`` does from 0.18 on."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return next((text for text in texts if _UPSTREAM.match(text)), "")


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _module_file(module: str, folders: Iterable[Path]) -> Path | None:
    parts = module.split(".")
    for folder in folders:
        for path in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__main__.py")):
            if path.is_file():
                return path
    return None
