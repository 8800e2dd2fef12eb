"""Objects that other projects' controllers read: they agree with our manifests, and with those projects' schemas.

The schemas are not part of the repository: UNICRON_CRDS is a folder with definitions (CustomResourceDefinition) of the
Prometheus operator, as its repository has them in ``example/prometheus-operator-crd``, and of Kueue, there in
``config/components/crd/bases``.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.publish import chart
from services.api.main import application
from tests.manifests import KUBERNETES, built, find, pod_template

CRDS = "UNICRON_CRDS"
QUEUES = list(yaml.safe_load_all((KUBERNETES / "overlays" / "queue" / "queues.yaml").read_text()))

Record = dict[str, Any]


@functools.cache
def optional() -> list[Record]:
    """Return the objects of the Prometheus operator, for which kustomize runs."""
    return [one for one in chart.build(chart.SOURCE) if one["apiVersion"].startswith("monitoring.coreos.com/")]


def found(kind: str) -> Record:
    """Return the spec of the one object of a kind."""
    (spec,) = (one["spec"] for one in [*optional(), *QUEUES] if one["kind"] == kind)
    assert isinstance(spec, dict)
    return spec


def test_the_monitors_find_the_ports_of_all_four_services() -> None:
    pods = found("PodMonitor")
    (expression,) = pods["selector"]["matchExpressions"]
    assert expression["operator"] == "In"
    (endpoint,) = pods["podMetricsEndpoints"]
    seen = set()
    for template in filter(None, map(pod_template, built("production"))):
        component = template["metadata"]["labels"][expression["key"]]
        if component in expression["values"]:
            (container,) = template["spec"]["containers"]
            assert endpoint["port"] in {port["name"] for port in container["ports"]}
            assert template["metadata"]["labels"][pods["jobLabel"]] == "unicron", "the alert rules select by this job"
            seen.add(component)
    assert seen == set(expression["values"]) == {"detector", "planner", "transition"}


def test_the_monitor_of_the_api_finds_its_service() -> None:
    monitor = found("ServiceMonitor")
    wanted = monitor["selector"]["matchLabels"].items()
    (service,) = (
        one for one in built("production") if one["kind"] == "Service" and wanted <= one["metadata"]["labels"].items()
    )
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "unicron"
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert "/metrics" in application().openapi()["paths"], "what is asked for by itself"
    assert endpoint["authorization"]["credentials"] == {"name": "unicron-metrics", "key": "token"}


# ---- Kueue

POWERS = {"": 1, "Gi": 2**30, "Ti": 2**40}


def quantity(text: str | int) -> int:
    """Return a quantity of Kubernetes as a number; of those that the manifests have."""
    number = str(text).rstrip("GTi")
    return int(number) * POWERS[str(text)[len(number) :]]


def test_the_jobset_waits_in_a_queue_that_there_is() -> None:
    jobset = find("queue", "JobSet", "reservation-a")
    (queue,) = (one for one in QUEUES if one["kind"] == "LocalQueue")
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue["metadata"]["name"]
    assert jobset["metadata"]["namespace"] == queue["metadata"]["namespace"]
    names = {(one["kind"], one["metadata"]["name"]) for one in QUEUES}
    assert ("ClusterQueue", found("LocalQueue")["clusterQueue"]) in names
    (group,) = found("ClusterQueue")["resourceGroups"]
    assert {("ResourceFlavor", flavor["name"]) for flavor in group["flavors"]} <= names


def test_the_queue_has_room_for_all_that_the_jobset_asks_for() -> None:
    """Kueue never admits what asks for a resource that its queue does not cover."""
    jobset = find("queue", "JobSet", "reservation-a")
    (job,) = jobset["spec"]["replicatedJobs"]
    (agent,) = job["template"]["spec"]["template"]["spec"]["containers"]
    (group,) = found("ClusterQueue")["resourceGroups"]
    (flavor,) = group["flavors"]
    quotas = {one["name"]: quantity(one["nominalQuota"]) for one in flavor["resources"]}
    requests = agent["resources"]["requests"]
    assert quotas.keys() == set(group["coveredResources"]) == requests.keys()
    assert quotas == {name: job["template"]["spec"]["parallelism"] * quantity(one) for name, one in requests.items()}


def test_the_queue_gives_nodes_that_have_no_agent_yet() -> None:
    jobset = find("queue", "JobSet", "reservation-a")
    template = pod_template(jobset)
    assert template is not None
    assert "nodeSelector" not in template["spec"], "Kueue adds that of the flavor"
    daemons = find("production", "DaemonSet", "agent")["spec"]["template"]["spec"]["nodeSelector"]
    assert found("ResourceFlavor")["nodeLabels"].keys().isdisjoint(daemons)


# ---- schemas


def closed(schema: Any) -> Any:
    """Return a schema that refuses fields which it does not describe, as the API server does."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


def problems(document: Record, folder: Path) -> list[str]:
    """Return what is wrong with an object by the definition of its kind."""
    group, _, version = document["apiVersion"].partition("/")
    definitions = [yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")]
    (schema,) = (
        one["schema"]["openAPIV3Schema"]
        for definition in definitions
        if (definition["spec"]["group"], definition["spec"]["names"]["kind"]) == (group, document["kind"])
        for one in definition["spec"]["versions"]
        if one["name"] == version
    )
    schema = closed(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return [
        f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(document)
    ]


@pytest.mark.skipif(CRDS not in os.environ, reason=f"{CRDS} names no folder of definitions")
def test_objects_follow_the_definitions_of_their_kinds() -> None:
    folder = Path(os.environ[CRDS])
    for document in [*optional(), *QUEUES]:
        assert problems(document, folder) == []
        assert problems({**document, "spec": {**document["spec"], "selektor": {}}}, folder), "it would notice a mistake"
