"""What `make dist` publishes, and what names it: versions of images, and what is in them."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from deploy.publish import archives, sbom
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


# ---- bills of materials


@pytest.fixture(scope="module")
def bills() -> dict[str, dict[str, Any]]:
    """The bill of each image, as it is published."""
    return {image: json.loads(sbom.text(sbom.bill(image, of))) for image, of in sbom.contents().items()}


def test_bills_follow_the_schema_of_cyclonedx(bills: dict[str, dict[str, Any]]) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    for bill in bills.values():
        assert validator.validate_str(json.dumps(bill)) is None
        component = bill["metadata"]["component"]
        assert (component["type"], component["version"]) == ("container", VERSION)
    assert validator.validate_str(json.dumps({**bill, "components": [{"name": "x"}]})) is not None


def test_the_bill_of_the_control_image_has_what_it_installs_with_licences_and_hashes(
    bills: dict[str, dict[str, Any]],
) -> None:
    found = {one["name"]: one for one in bills["unicron-control"]["components"]}
    own = found.pop("unicron-cluster")
    installed = (ROOT / "deploy" / "requirements-control.txt").read_text()
    assert {f"{name}=={one['version']}" for name, one in found.items()} == set(
        re.findall(r"^[a-z].*==\S+", installed, re.MULTILINE)
    )
    assert [name for name, one in found.items() if not one.get("licenses")] == []
    hashes = {entry["content"] for one in found.values() for entry in one["externalReferences"][0]["hashes"]}
    assert hashes == set(re.findall(r"--hash=sha256:(\w+)", installed))
    assert "externalReferences" not in own


def test_the_bill_of_the_worker_image_has_what_ranks_need(bills: dict[str, dict[str, Any]]) -> None:
    exact = dict(re.findall(r"^([^#=\s]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    found = {one["name"]: one["version"] for one in bills["unicron-worker"]["components"]}
    assert found.items() >= {"unicron": VERSION, "unicron-cluster": VERSION, "torch": exact["torch"]}.items()
    assert {"megatron-core", "safetensors", "nats-py"} < found.keys()
    assert found.keys().isdisjoint({"pytest", "fastapi"})


# ---- archives


def archive(path: Path, *names: str) -> Path:
    """Make an OCI archive of images without content."""
    manifests = [{"digest": f"sha256:{name}", "annotations": {archives.TITLE: f"localhost/{name}:1"}} for name in names]
    text = json.dumps({"schemaVersion": 2, "manifests": manifests}).encode()
    entry = tarfile.TarInfo("index.json")
    entry.size = len(text)
    with tarfile.open(path, "w") as tar:
        tar.addfile(entry, io.BytesIO(text))
    return path


def test_the_digest_of_an_image_is_that_of_its_archive(tmp_path: Path) -> None:
    assert archives.digest(archive(tmp_path / "a.tar", "a")) == ("localhost/a:1", "sha256:a")
    with pytest.raises(ValueError, match=r"2 images, and not one"):
        archives.digest(archive(tmp_path / "b.tar", "a", "b"))
