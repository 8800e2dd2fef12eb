"""`make dist-images`: archives that another machine can load, under the versions and digests that it says."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.publish import archives
from tests.containers import images
from tests.containers.podman import environment, inspected, podman
from tests.manifests import ROOT, VERSION

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]

NAMES = "localhost/unicron-test-dist"


@pytest.fixture(scope="module")
def folder(built: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What is published, of the layers that the other tests' images have already."""
    path = tmp_path_factory.mktemp("dist")
    with images.pip_volumes() as volumes:
        variables = {
            "BASE_IMAGE": built["BASE_IMAGE"],
            "BUILD_ARGS": " ".join(["--network", "host", *volumes]),
            "IMAGES": NAMES,
            "DIST": str(path),
        }
        command = ["make", "dist-images", *(f"{name}={value}" for name, value in variables.items())]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **environment()}, check=True, timeout=2 * images.BUILD_S)
    yield path
    for target in ("control", "worker"):
        podman("image", "rm", "--force", f"{NAMES}-{target}:{VERSION}")


def test_an_archive_is_the_image_of_this_version(folder: Path) -> None:
    listed = dict(line.split() for line in (folder / "images.txt").read_text().splitlines())
    for target in ("control", "worker"):
        image = f"{NAMES}-{target}:{VERSION}"
        name, digest = archives.digest(folder / f"unicron-{target}-{VERSION}.oci.tar")
        assert name == image
        assert listed[f"{image.rpartition('/')[2]}@{digest}"] == f"unicron-{target}-{VERSION}.oci.tar"
        labels = inspected("image", image)["Labels"]
        assert labels["org.opencontainers.image.version"] == VERSION
        assert len(labels["org.opencontainers.image.revision"]) == 40


def test_an_archive_can_be_loaded_and_run(folder: Path) -> None:
    image = f"{NAMES}-control:{VERSION}"
    podman("image", "rm", "--force", image)
    podman("load", "--input", folder / f"unicron-control-{VERSION}.oci.tar", limit_s=images.BUILD_S)
    said = podman("run", "--rm", "--read-only", "--network", "none", image, "unicron", "--version")
    assert VERSION in said
