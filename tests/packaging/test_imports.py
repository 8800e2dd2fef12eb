"""Imports point one way: cli -> simulator -> services -> shared; unicron stands alone; no torch in services."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ("cli", "services", "shared", "simulator", "unicron")
HEAVY = ("torch", "megatron")
SERVICES = ("api", "detector", "planner", "transition")

ALLOWED = {
    "shared": ["shared"],
    "services": ["shared"],
    "services.api": ["shared", "services.api"],
    "services.detector": ["shared", "services.detector", "unicron.protocol"],
    "services.planner": ["shared", "services.planner"],
    "services.transition": ["shared", "services.transition"],
    "simulator": ["shared", "services", "simulator"],
    "cli": ["shared", "services", "simulator", "cli"],
    "unicron": ["unicron"],
}
"""Part -> the prefixes of project modules that it may import."""


def modules() -> list[str]:
    """Return the name of every module of the project's packages."""
    paths = sorted(path for package in PROJECT for path in (ROOT / package).rglob("*.py"))
    return [module_name(path.relative_to(ROOT)) for path in paths]


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def path_of(module: str) -> Path:
    base = ROOT / module.replace(".", "/")
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def part_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "services" and len(parts) > 1 else parts[0]


def imports(module: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every module that the source may import, at any depth of it, with the line."""
    package = module if path_of(module).name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                # `from services import planner` imports a module; `from shared.log import EventLog` does not.
                deeper = f"{base}.{alias.name}"
                yield (deeper if path_of(deeper).exists() else base), node.lineno


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def offences(module: str, source: str) -> list[str]:
    """Return what a module imports of the project and may not."""
    allowed = ALLOWED[part_of(module)]
    return [
        f"{module}:{line} imports {target}"
        for target, line in imports(module, ast.parse(source))
        if target.split(".")[0] in PROJECT and not any(within(target, prefix) for prefix in allowed)
    ]


@pytest.mark.parametrize("module", modules())
def test_imports_point_one_way(module: str) -> None:
    assert offences(module, path_of(module).read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("services.planner.core", "from services.detector import core"),
        ("services.planner.core", "from services import detector"),
        ("services.planner.core", "def f():\n    import services.api.main"),
        ("services.planner.core", "import unicron.protocol"),
        ("services.detector.agent", "from unicron import runtime"),
        ("services.detector.agent", "import unicron"),
        ("shared.log", "from services.planner.core import decide"),
        ("unicron.protocol", "from shared.errors import UnicronError"),
        ("simulator.policy", "from cli.main import main"),
    ],
)
def test_an_arrow_the_other_way_is_noticed(module: str, source: str) -> None:
    assert len(offences(module, source)) == 1


def test_the_agent_may_speak_the_protocol() -> None:
    assert offences("services.detector.agent", "from unicron import protocol\nfrom unicron.protocol import Hello") == []


def test_the_protocol_needs_the_standard_library_only() -> None:
    tree = ast.parse(path_of("unicron.protocol").read_text())
    used = {target.split(".")[0] for target, _ in imports("unicron.protocol", tree)}
    assert used <= sys.stdlib_module_names


@pytest.mark.parametrize("module", [m for m in modules() if m.startswith(("shared", "services"))])
def test_the_control_plane_never_imports_torch(module: str) -> None:
    """Not at any depth: a function that imports it would fail where only the base dependencies are."""
    tree = ast.parse(path_of(module).read_text())
    assert [target for target, _ in imports(module, tree) if target.split(".")[0] in HEAVY] == []


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_nothing_that_the_control_plane_loads_brings_torch_in() -> None:
    names = [m for m in modules() if part_of(m) != "unicron" and not m.endswith("__main__")]
    code = "import importlib, sys\n" + "".join(f"importlib.import_module({name!r})\n" for name in names)
    assert run_python(code + f"print(sorted(set({HEAVY!r}) & set(sys.modules)))").strip() == "[]"


def test_importing_unicron_loads_the_standard_library_only() -> None:
    """A user's process gets nothing it did not ask for until it uses a trainer."""
    code = "import sys; before = set(sys.modules); import unicron, unicron.protocol\n"
    code += "print(*{m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    assert run_python(code).split() == ["unicron"]
