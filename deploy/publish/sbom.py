"""Writes what pip installs into the two images as software bills of materials: `make dist`.

CycloneDX 1.6 as JSON, a file for each image. Versions are those of constraints.txt, licences those that the installed
distributions name. Of the control image each distribution has the hashes by which pip checks it (`make requirements`).
What the base image has, and the CUDA libraries that torch brings, is not in them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.requirements import Requirement

from deploy.publish.notices import ROOT, licence, needed

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LIBRARY = tomllib.loads((ROOT / "unicron" / "pyproject.toml").read_text())["project"]
VERSION: str = PROJECT["version"]

PINNED = re.compile(r"^([a-z\d-]+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})*)$", re.MULTILINE)
"""A line of constraints.txt, or one of deploy/requirements-*.txt with its hashes."""


def contents() -> dict[str, dict[str, tuple[str, list[str]]]]:
    """Return image -> distribution -> its version, and the SHA-256 of each of its files that pip may take."""
    control = _pinned(ROOT / "deploy" / "requirements-control.txt")
    exact = _pinned(ROOT / "constraints.txt")
    asked = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["agent"]]
    asked += [*LIBRARY["dependencies"], *LIBRARY["optional-dependencies"]["train"]]
    in_worker = sorted(needed(map(Requirement, asked)) - {LIBRARY["name"]})
    # The images also have what this project builds itself.
    own: dict[str, tuple[str, list[str]]] = {PROJECT["name"]: (VERSION, [])}
    library: dict[str, tuple[str, list[str]]] = {LIBRARY["name"]: (LIBRARY["version"], [])}
    return {
        "unicron-control": own | control,
        "unicron-worker": own | library | {name: exact[name] for name in in_worker},
    }


def _pinned(file: Path) -> dict[str, tuple[str, list[str]]]:
    found = PINNED.findall(file.read_text())
    return {name: (version, re.findall(r"sha256:(\w+)", hashes)) for name, version, hashes in found}


def bill(image: str, distributions: Mapping[str, tuple[str, list[str]]]) -> Bom:
    """Make the bill of an image."""
    root = Component(name=image, version=VERSION, type=ComponentType.CONTAINER, bom_ref=f"{image}@{VERSION}")
    bom = Bom(metadata=BomMetaData(component=root))
    for name, (version, hashes) in distributions.items():
        bom.components.add(_component(name, version, hashes))
    bom.register_dependency(root, bom.components)
    return bom


def _component(name: str, version: str, hashes: list[str]) -> Component:
    purl = PackageURL("pypi", None, name, version)
    try:
        licences = [LicenseFactory().make_from_string(licence(name))]
    except (importlib.metadata.PackageNotFoundError, ValueError):
        licences = []  # unknown here, which a bill may leave open
    # The hashes are those of all files of the version: which of them pip takes depends on the machine.
    index = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(f"https://pypi.org/simple/{name}/"),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=one) for one in hashes],
    )
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=str(purl),
        purl=purl,
        licenses=licences,
        external_references=[index] if hashes else [],
    )


def text(bom: Bom) -> str:
    """Return a bill as CycloneDX JSON."""
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the bills are written")
    folder: Path = parser.parse_args().folder
    for image, distributions in contents().items():
        (folder / f"{image}-{VERSION}.cdx.json").write_text(text(bill(image, distributions)))
