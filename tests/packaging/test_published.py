"""What `make dist` publishes, and what names it: versions of images, and what is in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.manifests import ROOT, VERSION, built, pod_template

NAMED = ("docker-compose.yml", "Dockerfile", "deploy/kubernetes/**/*.yaml", "docs/**/*.md")
"""What has a user build, start or pull an image."""

_OURS = re.compile(r"(?:--tag |image: (?:\$\{\w+:-)?|docker run .*? )(unicron-(?:control|worker)[^\s}]*)")


def tagged(image: str) -> bool:
    """Return whether the name of an image says a version, or what it has (a digest)."""
    last = image.rpartition("/")[2]
    _, _, version = last.partition("@" if "@" in last else ":")
    return version not in ("", "latest")


def images(overlay: str) -> Iterator[str]:
    """Yield the image of each container of an overlay."""
    for template in filter(None, map(pod_template, built(overlay))):
        yield from (one["image"] for kind in ("initContainers", "containers") for one in template["spec"].get(kind, []))


@pytest.mark.parametrize("overlay", ["dev", "production", "reservation"])
def test_manifests_name_versions(overlay: str) -> None:
    found = set(images(overlay))
    assert f"unicron-worker:{VERSION}" in found
    assert {image for image in found if not tagged(image)} == set()


def test_compose_names_versions() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    found = re.findall(r"(?:image: |BASE_IMAGE: )\$\{\w+:-([^}]+)\}", text)
    assert {f"unicron-control:{VERSION}", f"unicron-worker:{VERSION}"} < set(found)
    assert [image for image in found if not tagged(image)] == []


def test_texts_name_the_images_of_this_version() -> None:
    """The sources of kustomize name ours without one, which kustomization.yaml adds."""
    texts = {path: path.read_text() for pattern in NAMED for path in ROOT.glob(pattern)}
    named = [(path, image) for path, text in texts.items() for image in _OURS.findall(text.replace("\\\n", ""))]
    manifests = Path(ROOT, "deploy", "kubernetes")
    assert len({path for path, _ in named}) > 5
    assert {one for one in named if one[1].partition(":")[2] != VERSION and manifests not in one[0].parents} == set()
    assert {path for path, text in texts.items() if re.search(r":\s*latest\b", text)} == set()


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("nats", False),
        ("nats:latest", False),
        ("registry:5000/nats", False),
        ("nats:2.15-alpine", True),
        ("registry:5000/nats@sha256:0123", True),
    ],
)
def test_an_image_without_a_version_is_noticed(image: str, expected: bool) -> None:
    assert tagged(image) is expected
