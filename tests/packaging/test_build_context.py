"""What .dockerignore sends to a builder is enough to build the project from, and no more."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from docker.utils.build import exclude_paths

ROOT = Path(__file__).resolve().parents[2]
TOOL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
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
def wheel(context: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in the wheel that is built of it, without the folder that has the version in its name."""
    folder = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(context, folder / "source")  # a build writes to its source
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", folder, source], check=True, timeout=BUILD_LIMIT_S)
    (file,) = folder.glob("*.whl")
    return {name.split(".data/data/")[-1] for name in zipfile.ZipFile(file).namelist()}


def test_the_wheel_has_every_module(wheel: set[str]) -> None:
    modules = {
        str(path.relative_to(ROOT))
        for package in TOOL["packages"]
        for path in (ROOT / package.replace(".", "/")).glob("*.py")
    }
    assert modules
    assert modules <= wheel


def test_the_wheel_has_the_data_of_packages_and_the_examples(wheel: set[str]) -> None:
    patterns = TOOL["package-data"]["*"]
    data = {
        str(path.relative_to(ROOT))
        for package in TOOL["packages"]
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    examples = {f"{where}/{Path(name).name}" for where, names in TOOL["data-files"].items() for name in names}
    assert data
    assert data | examples <= wheel


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
    packages = {package.split(".")[0] for package in TOOL["packages"]}
    assert sent == packages | {"LICENSE", "README.md", "constraints.txt", "deploy", "examples", "pyproject.toml"}
    deploy = {path.name for path in (context / "deploy").iterdir()}
    assert deploy == {"healthcheck.py", "load_control.py", "requirements-build.txt", "requirements-control.txt"}
    assert not [*context.rglob("__pycache__"), *(context / "examples").glob("corpus.*")]
