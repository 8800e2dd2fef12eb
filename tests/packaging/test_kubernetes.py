"""deploy/kubernetes: what kustomize builds is valid, and agrees with the code and with docker-compose.yml."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from services.agent.cluster.departure import SAVE_FACTOR
from services.agent.files.rank_users import NEEDED, may_not_switch
from services.api.main import application
from shared.bus.identities import SERVICES
from shared.messages.health import AGENT
from shared.settings.model import Settings, read_settings
from tests import manifests
from tests.manifests import KUBERNETES, built, find, pod_template

ROOT = KUBERNETES.parents[1]
VERSION = "1.37"
"""Of Kubernetes, whose schemas are used."""

OVERLAYS = ("dev", "production", "reservation", "queue")
JOBSET = json.loads((Path(__file__).parent / "kubernetes_schemas" / "jobset-v1alpha2.json").read_text())
SETTINGS = {f"UNICRON_{name.upper()}" for name in Settings.model_fields}
COMPONENT = "app.kubernetes.io/component"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]

END_S = 15.0
"""For the end behind a drain: the supervisor, the fork server and the ranks."""

Record = dict[str, Any]


def templates(overlay: str) -> Iterator[tuple[str, Record]]:
    """Yield the component of each workload with its pods' template."""
    for document in built(overlay):
        if template := pod_template(document):
            yield template["metadata"]["labels"][COMPONENT], template


def containers(overlay: str) -> Iterator[tuple[str, Record]]:
    """Yield the component of each workload with each of its containers, those for the start included."""
    for component, template in templates(overlay):
        spec = template["spec"]
        yield from ((component, one) for one in [*spec.get("initContainers", []), *spec["containers"]])


def main_container(overlay: str, component: str) -> Record:
    """Return the container of a component's pods."""
    (template,) = (one for name, one in templates(overlay) if name == component)
    (found,) = template["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def settings_files(overlay: str, container: Record) -> Iterator[str]:
    """Yield the names of the variables that a container has from ConfigMaps of the overlay."""
    for source in container.get("envFrom", []):
        if reference := source.get("configMapRef"):
            yield from find(overlay, "ConfigMap", reference["name"])["data"]


# ---- schemas


def problems(document: Record) -> list[str]:
    """Return what is wrong with a document by its schema."""
    if document["kind"] != "JobSet":
        try:
            kubernetes_validate.validate(document, VERSION, strict=True)
        except kubernetes_validate.ValidationError as err:
            return [str(err)]
        return []
    found = [error.message for error in jsonschema.Draft202012Validator(JOBSET).iter_errors(document)]
    for one in document["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": one["name"]}, **one["template"]}
        found += problems(job)
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_built_follows_the_schemas(overlay: str) -> None:
    assert {document["metadata"]["name"]: problems(document) for document in built(overlay) if problems(document)} == {}


@pytest.mark.parametrize("kind", ["DaemonSet", "JobSet"])
def test_the_schemas_would_notice_a_mistake(kind: str) -> None:
    overlay = "reservation" if kind == "JobSet" else "dev"
    (document,) = (one for one in built(overlay) if one["kind"] == kind)
    wrong = json.loads(json.dumps(document))
    template = pod_template(wrong)
    assert template is not None
    template["spec"]["containers"][0]["readynessProbe"] = {}
    assert problems(wrong)
    assert problems({**document, "spec": {**document["spec"], "replicatedJob": []}})


def test_the_schema_of_jobset_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(JOBSET)


# ---- the code


def test_all_parts_are_there() -> None:
    assert {name for name, _ in templates("dev")} == {*SERVICES, "nats", "postgres", "agent"}
    assert {name for name, _ in templates("production")} == {*SERVICES, "nats", "agent"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_setting_exists_and_takes_its_value(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for component, container in containers(overlay):
        ours = {one["name"]: one.get("value") for one in container.get("env", []) if one["name"].startswith("UNICRON_")}
        from_files = set(settings_files(overlay, container))
        assert {*ours, *from_files} <= SETTINGS, component
        for variable, value in ours.items():
            if value is not None:
                monkeypatch.setenv(variable, value)
        for variable in from_files:
            (text,) = (one["data"][variable] for one in built(overlay) if variable in one.get("data", {}))
            monkeypatch.setenv(variable, text)
        read_settings()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_commands_are_modules_and_images_are_targets(overlay: str) -> None:
    targets = re.findall(r"^FROM base AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for component, container in containers(overlay):
        if component in ("nats", "postgres"):
            compose = COMPOSE[component]["image"]
            assert compose == f"${{{component.upper()}_IMAGE:-{container['image']}}}"
            continue
        target = "worker" if component == "agent" else "control"
        assert target in targets
        assert container["image"] == f"unicron-{target}:{manifests.VERSION}"
        if container["name"] != "folders":
            (module,) = re.findall(r"python -P -m ([\w.]+)$", " ".join(container["command"]))
            assert module == f"services.{component}.main"
            assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("overlay", ["dev", "production"])
def test_probes_ask_what_is_answered(overlay: str) -> None:
    paths = {"api": set(application().openapi()["paths"])}
    for component, container in containers(overlay):
        ports = {one["name"]: one["containerPort"] for one in container.get("ports", [])}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = container.get(kind, {})
            if "httpGet" in probe:
                assert probe["httpGet"]["port"] in ports
                path = probe["httpGet"]["path"].split("?")[0]
                known = paths.get(component, {"/healthz"} if component == "nats" else {"/metrics"})
                assert path in known, (component, kind)
            elif component in {*SERVICES, "agent"} and probe:
                *_, script, asked = probe["exec"]["command"]
                assert script == "/opt/unicron/healthcheck.py"
                assert asked == (AGENT.rstrip("-") if component == "agent" else component)


def test_liveness_is_nothing_that_others_decide() -> None:
    """A restart while PostgreSQL or NATS is away is of no use, and one of an agent's container would end ranks."""
    alive = {name: one["livenessProbe"] for name, one in containers("production") if "livenessProbe" in one}
    assert alive.keys() == {*SERVICES, "nats"}
    assert alive["api"]["httpGet"]["path"] == "/healthz"
    assert main_container("production", "api")["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_ports_agree() -> None:
    config = (ROOT / "deploy" / "nats" / "nats.conf").read_text()
    cluster = (KUBERNETES / "overlays" / "production" / "cluster.conf").read_text()
    nats = {one["name"]: one["containerPort"] for one in main_container("production", "nats")["ports"]}
    for name, text in (("client", config), ("health", config), ("route", cluster)):
        assert f'"0.0.0.0:{nats[name]}"' in text
    for overlay in ("dev", "production"):
        for service in (one for one in built(overlay) if one["kind"] == "Service"):
            ports = main_container(overlay, service["spec"]["selector"][COMPONENT])["ports"]
            assert {one["port"] for one in service["spec"]["ports"]} <= {one["containerPort"] for one in ports}
    for name in SERVICES:
        variables = {one["name"]: one.get("value") for one in main_container("dev", name)["env"]}
        (port,) = main_container("dev", name)["ports"]
        given = variables["UNICRON_PORT"] if name == "api" else variables["UNICRON_METRICS_ADDRESS"].split(":")[1]
        assert given == str(port["containerPort"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_agent_may_drain_its_node_before_it_is_killed(overlay: str) -> None:
    (template,) = (one for name, one in templates(overlay) if name == "agent")
    agent = main_container(overlay, "agent")
    variables = {one["name"]: one.get("value") for one in agent["env"]}
    drain_s = SAVE_FACTOR * float(variables["UNICRON_DRAIN_TIMEOUT_S"])
    hook = agent["lifecycle"]["preStop"]["exec"]["command"][-1]
    (waits_s,) = (int(text) for text in re.findall(r"test \$n -lt (\d+)", hook))
    grace_s = template["spec"]["terminationGracePeriodSeconds"]
    assert drain_s < waits_s
    assert waits_s + END_S <= grace_s
    assert grace_s == int(COMPOSE["agent-n0"]["stop_grace_period"].removesuffix("s"))
    file = '"$UNICRON_RUN_DIR/$UNICRON_NODE.pid"'
    assert file in hook
    assert f"echo $$$$ > {file}" in agent["command"][-1], "Kubernetes makes $$ of $$$$"
    node = next(one for one in agent["env"] if one["name"] == "UNICRON_NODE")
    assert node["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"


@pytest.mark.parametrize("overlay", ["production", "reservation"])
def test_a_worker_has_a_gpu(overlay: str) -> None:
    agent = main_container(overlay, "agent")
    variables = {one["name"]: one.get("value") for one in agent["env"]}
    resources = agent["resources"]
    gpus = resources["limits"]["nvidia.com/gpu"]
    assert resources["requests"]["nvidia.com/gpu"] == gpus == variables["UNICRON_WORKERS_PER_NODE"]


def test_a_reservation_runs_the_pod_of_production() -> None:
    found = []
    for overlay in ("production", "reservation"):
        (template,) = (one for name, one in templates(overlay) if name == "agent")
        spec = {key: value for key, value in template["spec"].items() if key not in SCHEDULING}
        spec["volumes"] = sorted(spec["volumes"], key=lambda one: str(one["name"]))
        for one in [*spec["containers"], *spec["initContainers"]]:
            one["env"] = sorted(one["env"], key=lambda entry: str(entry["name"]))
            one["volumeMounts"] = sorted(one["volumeMounts"], key=lambda entry: str(entry["name"]))
        found.append(spec)
    assert found[0] == found[1]


SCHEDULING = ("nodeSelector", "affinity", "restartPolicy")
"""In what a reservation's pods differ."""


def test_a_reservation_loses_one_node_at_a_time() -> None:
    jobset, budget = (find("reservation", kind, "reservation-a") for kind in ("JobSet", "PodDisruptionBudget"))
    (jobs,) = jobset["spec"]["replicatedJobs"]
    job = jobs["template"]["spec"]
    assert job["parallelism"] == job["completions"] == budget["spec"]["minAvailable"] + 1
    assert budget["spec"]["selector"]["matchLabels"].items() <= job["template"]["metadata"]["labels"].items()


def test_the_stream_is_on_as_many_servers_as_there_are() -> None:
    servers = find("production", "StatefulSet", "nats")["spec"]["replicas"]
    for name in SERVICES:
        assert "UNICRON_LOG_STREAM_REPLICAS" in settings_files("production", main_container("production", name))
    (text,) = re.findall(
        r"^UNICRON_LOG_STREAM_REPLICAS=(\d+)$",
        (KUBERNETES / "overlays" / "production" / "settings.env").read_text(),
        re.MULTILINE,
    )
    assert int(text) == servers == 3
    routes = [
        one for one in main_container("production", "nats")["env"] if one["name"].startswith("ROUTE_PASSWORD") is False
    ]
    hosts = {found for one in routes for found in re.findall(r"@([\w.-]+):6222", one.get("value", ""))}
    assert hosts == {f"nats-{index}.nats-peers" for index in range(servers)}


# ---- rights


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_containers_have_the_least_rights(overlay: str) -> None:
    for component, template in templates(overlay):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["serviceAccountName"] == ("agent" if component == "agent" else "control")
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        if component != "agent":
            assert spec["securityContext"]["runAsNonRoot"] is True
        for one in [*spec.get("initContainers", []), *spec["containers"]]:
            rights = one["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"]["drop"] == ["ALL"]
            assert bool(rights["capabilities"].get("add")) == (one["name"] == "agent")
            assert "memory" in one["resources"]["limits"]
            assert one["resources"]["requests"].keys() >= {"cpu", "memory"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_agent_is_root_only_to_give_tasks_users_of_their_own(overlay: str) -> None:
    added = main_container(overlay, "agent")["securityContext"]["capabilities"]["add"]
    capabilities = sum(1 << bit for bit, text in NEEDED.items() if text.removeprefix("CAP_") in added)
    assert len(added) == len(NEEDED)
    assert not may_not_switch(0, f"CapEff:\t{capabilities:016x}\n")


def test_a_machine_has_the_credential_of_its_own_node_only() -> None:
    for overlay in ("production", "reservation"):
        (template,) = (one for name, one in templates(overlay) if name == "agent")
        volumes = {one["name"]: one for one in template["spec"]["volumes"]}
        assert volumes["credential"]["hostPath"] == {"path": "/etc/unicron/node.json", "type": "File"}
    for name in SERVICES:
        (template,) = (one for component, one in templates("production") if component == name)
        named = [one["secret"]["secretName"] for one in template["spec"]["volumes"] if "secret" in one]
        assert named == [f"unicron-{name}"]


@pytest.mark.parametrize("overlay", ["dev", "production"])
def test_no_role_is_given(overlay: str) -> None:
    assert not [one for one in built(overlay) if "Role" in one["kind"]]
    for one in built(overlay):
        if one["kind"] == "ServiceAccount":
            assert one["automountServiceAccountToken"] is False


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_select_something(overlay: str) -> None:
    """Those of NetworkPolicies, budgets and Services; the reservation's are those of pods of another overlay, too."""
    labels = [one["metadata"]["labels"] for _, one in templates(overlay)]
    for document in built(overlay):
        for selector in selectors(document):
            for wanted in alternatives(selector):
                assert any(wanted.items() <= have.items() for have in labels), (document["metadata"]["name"], wanted)


def selectors(found: Any, key: str = "") -> Iterator[Record]:
    """Yield each selector of pods in a document."""
    if isinstance(found, list):
        for one in found:
            yield from selectors(one, key)
    elif isinstance(found, dict):
        if key in ("podSelector", "selector"):
            yield found if found.keys() & {"matchLabels", "matchExpressions"} or not found else {"matchLabels": found}
        else:
            for name, one in found.items():
                yield from selectors(one, name)


def alternatives(selector: Record) -> Iterator[Record]:
    """Yield label sets each of which is to exist."""
    labels = selector.get("matchLabels", {})
    expressions = selector.get("matchExpressions", [])
    if not expressions:
        yield labels
    for one in expressions:
        assert one["operator"] == "In"
        for value in one["values"]:
            yield {**labels, one["key"]: value}


def test_agents_reach_neither_the_log_nor_the_api() -> None:
    for document in built("dev"):
        if document["kind"] == "NetworkPolicy" and document["metadata"]["name"] in ("postgres", "to-the-log"):
            assert "agent" not in json.dumps(document)
    everybody = find("dev", "NetworkPolicy", "nobody")["spec"]
    assert everybody == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
