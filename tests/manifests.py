"""The manifests of deploy/kubernetes, built by kubectl's own kustomize."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any

from deploy.publish.chart import build

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"

VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
"""Of the project, and so of its images and its chart."""


@functools.cache
def built(overlay: str) -> tuple[dict[str, Any], ...]:
    """Return the documents of an overlay."""
    return tuple(build(KUBERNETES / "overlays" / overlay))


def find(overlay: str, kind: str, name: str) -> dict[str, Any]:
    """Return a document of an overlay."""
    (found,) = (one for one in built(overlay) if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pod_template(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return the template of a workload's pods, with metadata and spec; None if the document is no workload."""
    spec: dict[str, Any] = document.get("spec", {})
    if document["kind"] == "JobSet":
        (job,) = spec["replicatedJobs"]
        spec = job["template"]["spec"]
    template: dict[str, Any] | None = spec.get("template")
    return template
