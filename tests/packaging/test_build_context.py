"""What .dockerignore sends to a builder is enough to build both distributions from, and no more; what is in them."""

import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from docker.utils.build import exclude_paths

ROOT = Path(__file__).resolve().parents[2]
TOOL, LIBRARY = (
    tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["setuptools"] for folder in (ROOT, ROOT / "unicron")
)
METADATA = re.compile(r"unicron(_cluster)?-[\d.]+\.(dist-info|data)/")

BUILD_LIMIT_S = 120
"""A few seconds on two free cores."""


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a builder gets."""
    folder = tmp_path_factory.mktemp("context")
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    for name in exclude_paths(str(ROOT), [rule for rule in rules if rule and not rule.startswith("#")]):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheels(context: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels that are built of it, by the names of their distributions."""
    folder = tmp_path_factory.mktemp("wheels")
    source = shutil.copytree(context, folder / "source")  # a build writes to its source
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", folder, source / "unicron", source], check=True, timeout=BUILD_LIMIT_S)
    return {file.name.partition("-")[0]: file for file in folder.glob("*.whl")}


def content(wheel: Path) -> set[str]:
    """Return the names in a wheel; of what goes into the folder ``share``, those below the installation."""
    return {name.split(".data/data/")[-1] for name in zipfile.ZipFile(wheel).namelist()}


def tops(wheel: Path) -> set[str]:
    """Return what a wheel puts into site-packages, but for its metadata."""
    return {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist() if not METADATA.match(name)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "of"), [("unicron_cluster", TOOL), ("unicron", LIBRARY)])
def test_a_wheel_has_every_module(wheels: dict[str, Path], name: str, of: dict[str, Any]) -> None:
    modules = {
        str(path.relative_to(ROOT))
        for package in of["packages"]
        for path in (ROOT / package.replace(".", "/")).glob("*.py")
    }
    assert modules
    assert modules == {file for file in content(wheels[name]) if file.endswith(".py") and "/examples/" not in file}


def test_the_wheel_has_the_data_of_packages_and_the_examples(wheels: dict[str, Path]) -> None:
    patterns = TOOL["package-data"]["*"]
    data = {
        str(path.relative_to(ROOT))
        for package in TOOL["packages"]
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    examples = {f"{where}/{Path(name).name}" for where, names in TOOL["data-files"].items() for name in names}
    assert data
    assert data | examples <= content(wheels["unicron_cluster"])


def test_the_library_is_one_package_and_all_else_is_the_other_distribution(wheels: dict[str, Path]) -> None:
    assert tops(wheels["unicron"]) == {"unicron"}
    assert tops(wheels["unicron_cluster"]) == {"cli", "services", "shared", "simulator", "unicron_client"}
    assert "unicron/py.typed" in content(wheels["unicron"])
    assert any(name.endswith("licenses/LICENSE") for name in content(wheels["unicron"]))


@pytest.mark.slow
def test_the_library_leaves_a_users_packages_alone(wheels: dict[str, Path], tmp_path: Path) -> None:
    """It is installed into an environment whose owner has packages named like the control plane's, and removed."""
    venv.create(tmp_path / "training", with_pip=False)
    python = tmp_path / "training" / "bin" / "python"
    folder = next(tmp_path.glob("training/lib/python3*/site-packages"))
    names = tops(wheels["unicron_cluster"])
    for name in names:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"hello = {name!r}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet"]
    install = [*pip, "install", "--no-compile", "--no-index", "--no-deps", str(wheels["unicron"])]
    subprocess.run(install, check=True, timeout=BUILD_LIMIT_S)

    code = "import os, sys, unicron, unicron.protocol.messages, unicron.forkserver, shared, services\n"
    code += "print(shared.hello, services.hello, os.path.dirname(unicron.__file__))"
    ran = subprocess.run([python, "-P", "-c", code], check=True, capture_output=True, text=True, env={}, timeout=60)
    assert ran.stdout.split() == ["shared", "services", str(folder / "unicron")]

    subprocess.run([*pip, "uninstall", "--yes", "unicron"], check=True, timeout=BUILD_LIMIT_S)
    assert not (folder / "unicron").exists()
    for name in names:
        assert (folder / name / "__init__.py").read_text() == f"hello = {name!r}\n"


def test_what_the_dockerfile_copies_is_sent(context: Path) -> None:
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            *sources, _ = line.split()[1:]
            for source in sources:
                assert (context / source).exists(), line


def test_nothing_else_is_sent(context: Path) -> None:
    """No secrets, no history, no tests: they would be in a layer, and change it."""
    # A builder gets its own two files in any case.
    sent = {path.name for path in context.iterdir()} - {"Dockerfile", ".dockerignore"}
    packages = {package.split(".")[0] for package in (*TOOL["packages"], *LIBRARY["packages"])}
    assert sent == packages | {"LICENSE", "README.md", "constraints.txt", "deploy", "examples", "pyproject.toml"}
    deploy = {path.name for path in (context / "deploy").iterdir()}
    assert deploy == {"healthcheck.py", "load_control.py", "requirements-build.txt", "requirements-control.txt"}
    assert not [*context.rglob("__pycache__"), *(context / "examples").glob("corpus.*")]
