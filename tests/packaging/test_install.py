"""`pip install .` into a clean environment gives a working command, without torch."""

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
INSTALL_LIMIT_S = 300
"""About 20 s on two free cores; pip downloads some 30 MB."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(INSTALL_LIMIT_S + 60)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder of the commands of a clean environment with the project in it; one for all test processes."""
    folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        folder = folder.parent  # what the test processes of one run share
    environment = folder / "installed"
    with FileLock(f"{environment}.lock"):
        if not (environment / "complete").exists():
            install(environment, folder / "source")
            (environment / "complete").touch()
    return environment / "bin"


def install(environment: Path, source: Path) -> None:
    """Make a clean environment with the project in it.

    The sources are copied first: a build in place would leave build/ and *.egg-info behind, and could take files that
    are not part of the project.
    """
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "tests", "docs", "unicron")
    shutil.copytree(ROOT, source, ignore=unwanted)
    venv.create(environment, with_pip=False)
    # Uncompiled: the commands below import a small part of what is installed.
    python = str(environment / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    subprocess.run(
        [*pip, "-c", source / "constraints.txt", f"{source}[control,embedded]"], check=True, timeout=INSTALL_LIMIT_S
    )
    shutil.rmtree(source)


def run(command: list[str | Path], *, cwd: Path) -> str:
    result = subprocess.run(
        command,
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": str(cwd)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_command_works(installed: Path, tmp_path: Path) -> None:
    assert "submit" in run([installed / "unicron", "--help"], cwd=tmp_path)


def test_folders_with_the_same_names_do_no_harm(installed: Path, tmp_path: Path) -> None:
    """A user's own shared/, services/ or cli/ beside where the command runs is not imported."""
    for name in ("cli", "services", "shared", "simulator"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    assert "submit" in run([installed / "unicron", "--help"], cwd=tmp_path)
    assert run([installed / "python", "-P", "-c", "import services.planner.main"], cwd=tmp_path) == ""


def test_metadata_and_examples_are_installed(installed: Path, tmp_path: Path) -> None:
    code = "import importlib.metadata as m; print(m.version('unicron-cluster'))"
    assert run([installed / "python", "-c", code], cwd=tmp_path).strip() == VERSION
    examples = installed.parent / "share" / "unicron" / "examples"
    named = PROJECT["tool"]["setuptools"]["data-files"]["share/unicron/examples"]
    installed_files = {path.name for path in examples.iterdir() if path.is_file()}
    assert installed_files == {Path(name).name for name in named}


def test_data_of_the_simulator_is_installed(installed: Path, tmp_path: Path) -> None:
    code = (
        "from simulator.workloads.paper_workloads import workload; print(workload('spot-p3').trace.present, end=' '); "
    )
    code += "from simulator.published import rows; print(workload('trace-a').trace.present, len(rows()) > 0)"
    assert run([installed / "python", "-P", "-c", code], cwd=tmp_path).split() == ["18", "16", "True"]


def test_torch_is_not_installed(installed: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u; print([u.find_spec(n) for n in ('torch', 'megatron')])"
    assert run([installed / "python", "-c", code], cwd=tmp_path).strip() == "[None, None]"


def test_the_real_server_comes_with_it(installed: Path, tmp_path: Path) -> None:
    assert "nats-server" in run([installed / "nats-server", "--version"], cwd=tmp_path)


def test_this_interpreter_is_the_supported_one() -> None:
    assert sys.version_info >= (3, 11)
