"""What importing a part loads.

Which part may import which other is checked by import-linter's contracts in pyproject.toml (``make check``).
"""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTROL_PLANE = ("cli", "services", "shared", "simulator")
HEAVY = ("torch", "megatron")


def modules(*packages: str) -> list[str]:
    """Return the name of every module of some packages."""
    paths = sorted(path.relative_to(ROOT) for package in packages for path in (ROOT / package).rglob("*.py"))
    return [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_nothing_that_the_control_plane_loads_brings_torch_in() -> None:
    code = "import importlib, sys\n"
    code += "".join(f"importlib.import_module({name!r})\n" for name in modules(*CONTROL_PLANE))
    assert run_python(code + f"print(sorted(set({HEAVY!r}) & set(sys.modules)))").strip() == "[]"


def test_a_node_agent_loads_no_database() -> None:
    """It has no log, and a node is without an agent for as long as the next one takes to start."""
    code = "import sys, services.agent.main, services.agent.agent_process; print('sqlalchemy' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_importing_unicron_loads_the_standard_library_only() -> None:
    """A user's process gets nothing it did not ask for until it uses a trainer."""
    code = "import sys; before = set(sys.modules)\n"
    code += "import unicron, unicron.protocol.messages, unicron.protocol.environment\n"
    code += "print(*{m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    assert run_python(code).split() == ["unicron"]


@pytest.mark.parametrize("name", ["protocol.environment", "protocol.messages", "protocol.versions"])
def test_what_the_agent_needs_of_the_library_needs_the_standard_library_only(name: str) -> None:
    tree = ast.parse((ROOT / "unicron" / f"{name.replace('.', '/')}.py").read_text())
    used = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    used |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in used} <= sys.stdlib_module_names


def test_the_client_brings_in_no_server_no_database_and_nothing_of_the_library() -> None:
    """A program that asks a cluster is no training process, and no service either."""
    code = "import sys; before = set(sys.modules); import unicron_client, shared.interface.models\n"
    code += "from unicron_client import specifications, asynchronous\n"
    code += "print(*sorted(set(sys.modules) - before))"
    loaded = run_python(code).split()
    heavy = {"torch", "megatron", "fastapi", "starlette", "sqlmodel", "sqlalchemy", "uvicorn", "nats", "numpy"}
    assert heavy & {module.partition(".")[0] for module in loaded} == set()
    assert [module for module in loaded if module.partition(".")[0] == "unicron"] == []


def test_the_client_loads_no_model_before_one_is_asked_for() -> None:
    """`unicron ps` prints JSON as it comes, and would wait for them."""
    code = "import sys, unicron_client; print('pydantic' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_the_contracts_name_every_module_of_the_library_but_the_protocol() -> None:
    """A new module of it is forbidden to the node agent without a thought of anybody."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    forbidden = {contract["id"]: {*contract.get("forbidden_modules", ())} for contract in contracts}
    folder = ROOT / "unicron"
    library = {f"unicron.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__"}
    library |= {f"unicron.{path.parent.name}" for path in folder.glob("*/__init__.py")}
    assert forbidden["agent-protocol"] == library - {"unicron.protocol"}


def test_no_import_is_excused_from_the_contracts() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert "ignore_imports" not in text
    assert "exclude_type_checking_imports" not in text
