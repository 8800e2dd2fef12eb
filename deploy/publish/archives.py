"""Writes the digests of the images in OCI archives: `make dist-images`.

A digest names what an image is, where a version names what it is called: a registry that takes an archive unchanged
(`skopeo copy oci-archive:FILE docker://NAME`) has the image under the same digest.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from pathlib import Path

TITLE = "org.opencontainers.image.ref.name"
"""The annotation in which an archive has the name of its image (OCI image specification, annotations)."""


def digest(archive: Path) -> tuple[str, str]:
    """Return the name and the digest (``sha256:...``) of the one image in an OCI archive.

    Raises:
        ValueError: the archive has another number of images than one.
    """
    with tarfile.open(archive) as tar:
        index = tar.extractfile("index.json")
        assert index is not None, "a file, by the OCI image layout"
        manifests = json.load(index)["manifests"]
    if len(manifests) != 1:
        raise ValueError(f"{archive}: {len(manifests)} images, and not one")
    return str(manifests[0].get("annotations", {}).get(TITLE, "")), str(manifests[0]["digest"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the archives are, and images.txt is written")
    folder: Path = parser.parse_args().folder
    rows = [(*digest(archive), archive.name) for archive in sorted(folder.glob("*.oci.tar"))]
    (folder / "images.txt").write_text("".join(f"{name.rpartition('/')[2]}@{one} {file}\n" for name, one, file in rows))
