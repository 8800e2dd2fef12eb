"""Writes THIRD-PARTY-NOTICES.md from the metadata of the installed distributions: `make notices`."""

import importlib.metadata
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "THIRD-PARTY-NOTICES.md"
RUNTIME_EXTRAS = {
    ROOT: ("agent", "control", "embedded", "fast", "plots", "parquet", "postgres"),
    ROOT / "unicron": ("train", "s3", "gcs"),
}
"""The extras that a cluster may run with, of each distribution; the others are tools."""

LONGEST_LICENCE = 80
"""Characters. Some distributions have the whole text in the field for the licence's name."""

HEAD = """# Third-party notices

The distributions that Unicron runs with, all extras included, as their own metadata describes them. None is part of
this repository; what else is part of it comes last. The texts of the licences are in the `.dist-info` folders, in the
images too (megatron-core and nvidia-ml-py bring none). The CUDA build of torch brings NVIDIA's libraries besides, under
NVIDIA's licences. `make notices` writes this page.

| name | version | licence | home page |
|---|---|---|---|
"""

TAIL = """
## In this repository

- uPlot 1.6.32, which draws the chart of the live page: MIT, <https://github.com/leeoniya/uPlot>. Its files are
  `uPlot.iife.min.js` and `uPlot.min.css` in `services/api/page`, unchanged, with the licence in `uPlot.LICENSE`.
"""


def runtime_requirements() -> list[Requirement]:
    """Return what the distributions ask for at run time, but for each other."""
    groups: list[list[str]] = []
    for folder, extras in RUNTIME_EXTRAS.items():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        groups += [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    asked = [Requirement(text) for group in groups for text in group]
    return [requirement for requirement in asked if requirement.name != "unicron"]


def needed(requirements: Iterable[Requirement]) -> set[str]:
    """Return the names of all distributions that requirements need here; what is not installed is not looked into."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, extra) for requirement in requirements for extra in ("", *requirement.extras)]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        found.add(name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            texts = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for other in map(Requirement, texts):
            if other.marker is None or other.marker.evaluate({"extra": extra}):
                waiting += [(other, inner) for inner in ("", *other.extras)]
    return found


def licence(name: str) -> str:
    """Return the licence of an installed distribution, as its metadata names it.

    Raises:
        PackageNotFoundError: it is not installed.
        ValueError: its metadata names no licence.
    """
    metadata = importlib.metadata.metadata(name)
    fields = {key: metadata.get_all(key) or [] for key in ("License-Expression", "License", "Classifier")}
    classified = [text.split(" :: ")[-1] for text in fields["Classifier"] if text.startswith("License ::")]
    named = [text for text in fields["License"] if "\n" not in text and len(text) <= LONGEST_LICENCE]
    # The two may differ, or one says more; "Apache Software License" adds nothing to "Apache 2.0".
    more = [text for text in classified if not any(text.split()[0] in name for name in named)]
    found = " AND ".join(fields["License-Expression"]) or ", ".join(named + more)
    if not found:
        raise ValueError(f"{name}: its metadata names no licence")
    return found


def row(name: str) -> str:
    """Return the row of an installed distribution.

    Raises:
        PackageNotFoundError: it is not installed.
        ValueError: its metadata names no licence.
    """
    metadata = importlib.metadata.metadata(name)
    urls = {
        label.lower(): url for label, url in (text.split(", ", 1) for text in metadata.get_all("Project-URL") or [])
    }
    labels = ("homepage", "home", "home-page", "repository", "source", "source code", "code", "github", *urls)
    pages = [*(metadata.get_all("Home-page") or []), *(urls[label] for label in labels if label in urls)]
    page = f"<{pages[0]}>" if pages else ""
    return f"| {name} | {Version(metadata['Version']).public} | {licence(name)} | {page} |"


if __name__ == "__main__":
    FILE.write_text(HEAD + "".join(f"{row(name)}\n" for name in sorted(needed(runtime_requirements()))) + TAIL)
