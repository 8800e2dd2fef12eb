"""The requirements with hashes agree with pyproject.toml and constraints.txt, and the images install by them."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy.publish.notices import needed

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONTROL = "requirements-control.txt"
BUILD = "requirements-build.txt"
PIN = re.compile(r"([a-z\d-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


def pinned(name: str) -> dict[str, str]:
    """Return the versions of a file that has nothing but pins with hashes, and comments."""
    text = "".join(re.findall(r"^(?!#|$).*\n", (ROOT / "deploy" / name).read_text(), re.MULTILINE))
    assert not PIN.sub("", text), "an index, a link or a pin without hash"
    return {match[1]: match[2] for match in PIN.finditer(text)}


@pytest.mark.parametrize("name", [CONTROL, BUILD])
def test_the_versions_are_those_of_the_constraints(name: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    exact = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = pinned(name)
    assert versions == {distribution: exact.get(distribution) for distribution in versions}, "make requirements"


def test_the_control_image_has_all_that_it_needs_and_no_more() -> None:
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *extras["control"], *extras["postgres"]]
    assert pinned(CONTROL).keys() == needed(map(Requirement, asked)), "make requirements"
    assert pinned(BUILD).keys() == {"setuptools"}


def test_the_images_install_the_control_plane_by_hash() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    for stage in ("build", "build-control"):
        for command in re.findall(r"pip install (.*)", dockerfile.split(f" AS {stage}\n")[1].split("\nFROM ")[0]):
            assert "--require-hashes" in command or {"--no-index", "--no-deps"} <= set(command.split())
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    for name in (CONTROL, BUILD):
        assert f"-r {name}" in dockerfile
        assert f"!deploy/{name}" in sent
