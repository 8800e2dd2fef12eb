"""The digest of a part of the program: by it, a program knows whether a file was written by the same code."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from shared.errors import NotFound

_CODE = frozenset({".py", ".pyc"})


def program_sha256(*packages: str) -> str:
    """Return the SHA-256 of the names and the contents of all modules of some packages.

    A version number would say less: it stays the same in a checkout, and a number for each fold would have to be raised
    by hand. To read all of ``shared`` takes milliseconds.

    Raises:
        NotFound: a package has no modules as files.
    """
    digest = hashlib.sha256()
    for package in packages:
        spec = importlib.util.find_spec(package)
        folders = [Path(each) for each in (spec.submodule_search_locations or ())] if spec is not None else []
        modules = sorted((path.relative_to(folder), path) for folder in folders for path in _modules(folder))
        if not modules:
            raise NotFound(f"package {package} has no modules as files")
        for name, path in modules:
            digest.update(f"{package}/{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _modules(folder: Path) -> list[Path]:
    """Return the modules of a package. A compiled module counts only if it stands in place of its source."""
    return [path for path in folder.rglob("*") if path.suffix in _CODE and path.parent.name != "__pycache__"]
