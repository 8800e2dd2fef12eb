"""The pods of the overlay `dev`, run by podman as a kubelet would: health, rights, and a drain by preStop."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.demo.report import TOLERANCE, compare_parameters
from services.agent.files.rank_users import NEEDED
from shared.nats.key_directory import KeyDirectory
from tests import manifests
from tests.containers.compose import PREFIX, left, remove
from tests.containers.kubelet import Cluster, Pod, Record
from tests.containers.podman import podman
from tests.containers.test_compose_up import (
    BATCH_S,
    BUILD_AND_START_S,
    HEALED_S,
    NODE_BACK_S,
    TASK,
    fetched,
    in_container,
    on_nodes,
)
from tests.e2e.kit import Client, Pace, reference, small_task

STEPS = 600
"""Of the task: at its pace they take two minutes on both nodes, and longer on one. The other's pod may start slowly."""

pytestmark = [pytest.mark.containers, pytest.mark.timeout(BUILD_AND_START_S)]

NODES = ("n0", "n1")
SERVICES = ("detector", "planner", "transition", "api")
SUBNET = "198.51.100.128/25"
"""TEST-NET-2 (RFC 5737), which is nobody's."""


@dataclass(frozen=True)
class Running:
    """``pods``: by the name of the workload, and those of the agents by their node. ``port``: of the api."""

    pods: dict[str, Pod]
    port: int


def content_of_secrets(folder: Path) -> dict[str, dict[str, str]]:
    """Return the Secrets of docs/deploy/kubernetes.md."""
    keys = KeyDirectory(folder)
    keys.make(["nats://nats:4222"])
    credentials = {f"{node}.json": keys.add_node(node).read_text() for node in NODES}
    password = secrets.token_hex(24)
    return {
        "unicron-nats-keys": {name: (folder / name).read_text() for name in ("authorization.conf", "tls.conf")},
        "unicron-nodes": credentials,
        "unicron-postgres": {"postgres-password": secrets.token_hex(24), "log-password": password},
        "unicron-log": {"url": f"postgresql+psycopg://unicron:{password}@postgres:5432/unicron"},
        **{f"unicron-{one}": {"nats": (folder / f"{one}.json").read_text()} for one in SERVICES},
    }


def template_of(kind: str, name: str) -> Record:
    """Return the template of a workload's pods, with its claims' templates as claims."""
    document = manifests.find("dev", kind, name)
    template = manifests.pod_template(document)
    assert template is not None
    claims = [one["metadata"]["name"] for one in document["spec"].get("volumeClaimTemplates", [])]
    more = [{"name": claim, "persistentVolumeClaim": {"claimName": f"{claim}-{name}-0"}} for claim in claims]
    return {**template, "spec": {**template["spec"], "volumes": [*template["spec"]["volumes"], *more]}}


@pytest.fixture(scope="module")
def running(built: dict[str, str], data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The overlay `dev` on two nodes, all ready."""
    project = f"{PREFIX}pods-{os.getpid()}"
    configs = {one["metadata"]["name"]: one["data"] for one in manifests.built("dev") if one["kind"] == "ConfigMap"}
    folder = tmp_path_factory.mktemp("pods")
    cluster = Cluster(
        project,
        folder,
        {
            f"unicron-control:{manifests.VERSION}": built["CONTROL_IMAGE"],
            f"unicron-worker:{manifests.VERSION}": built["WORKER_IMAGE"],
            "nats:2.15-alpine": built["NATS_IMAGE"],
            "postgres:17-alpine": built["POSTGRES_IMAGE"],
        },
        configs,
        content_of_secrets(folder / "keys"),
        # By its name: Debian gives another id than Alpine, and PostgreSQL works for no user that is not in passwd.
        {"postgres": "postgres"},
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    podman("network", "create", *cluster.label, "--subnet", SUBNET, project)
    pods: dict[str, Pod] = {}
    try:
        for name in ("nats", "postgres"):
            pods[name] = Pod(cluster, template_of("StatefulSet", name), f"{name}-0", "control", aliases=[name])
        for name in SERVICES:
            publish = [f"127.0.0.1:{port}:8642"] if name == "api" else []
            pods[name] = Pod(cluster, template_of("Deployment", name), name, "control", publish=publish)
        for node in NODES:
            template = with_data(template_of("DaemonSet", "agent"), data)
            pods[node] = Pod(cluster, template, f"agent-{node}", node)
        # The services wait for the first two, and the agents for the services; the api is ready with a node.
        for pod in pods.values():
            pod.start()
        for pod in pods.values():
            pod.wait_ready()
        yield Running(pods, port)
    finally:
        remove(project)
        assert left(project) == {}


def check_no_incident(client: Client) -> None:
    """Assert that there is no incident; with what led to it."""
    if incidents := client.items("/v1/incidents"):
        shown_types = ("error.detected", "plan.decided", "state.moved", "node.left", "node.draining")
        events = [one["event"] for one in client.items("/v1/events") if one["type"] in shown_types]
        shown = [{key: event.get(key) for key in EVENT_FIELDS if event.get(key)} for event in events]
        raise AssertionError("\n".join(map(str, [*(one["evidence"] for one in incidents), *shown])))


EVENT_FIELDS = (
    "type",
    "phase",
    "step",
    "trigger",
    "node",
    "kind",
    "detail",
    "code",
    "failed_workers",
    "workers",
    "pids",
)
"""What is shown of an event."""


def with_data(template: Record, data: Path) -> Record:
    """Return an agent's template with the tests' folder at /data, where the overlay `production` has a claim."""
    spec = template["spec"]
    (agent,) = spec["containers"]
    mount = {"name": "data", "mountPath": "/data", "readOnly": True}
    agent = {**agent, "volumeMounts": [*agent["volumeMounts"], mount]}
    volumes = [*spec["volumes"], {"name": "data", "hostPath": {"path": str(data)}}]
    return {**template, "spec": {**spec, "containers": [agent], "volumes": volumes}}


@pytest.fixture(scope="module")
def pods_client(running: Running) -> Iterator[Client]:
    """A client of the api."""
    with Client(f"http://127.0.0.1:{running.port}") as found:
        added = running.pods["api"].run("unicron", "token", "add", "tester", "--scope", "operate")
        found.http.headers["Authorization"] = f"Bearer {added.stdout.split()[-1]}"
        yield found


@pytest.mark.parametrize("name", [*SERVICES, *NODES])
def test_a_pod_has_the_rights_that_it_needs_and_no_more(running: Running, name: str) -> None:
    shown = running.pods[name].run("cat", "/proc/self/status").stdout.splitlines()
    status = {key: value.strip() for key, _, value in (line.partition(":") for line in shown)}
    allowed = sum(1 << bit for bit in NEEDED) if name in NODES else 0
    assert int(status["CapBnd"], 16) == allowed
    assert status["NoNewPrivs"] == "1"
    assert (status["Uid"].split()[0] == "0") == (name in NODES)


def test_tasks_may_not_rename_what_is_in_the_volumes(running: Running) -> None:
    modes = running.pods["n0"].run("stat", "--format", "%a", "/var/lib/unicron-node", "/dev/shm", "/tmp").stdout.split()
    assert modes == ["711", "1777", "1777"]


def test_prestop_drains_nodes_and_no_step_is_lost(
    running: Running, pods_client: Client, data: Path, tmp_path: Path
) -> None:
    """The pod of n1 is deleted while a task trains on both nodes, and made again; then both, as a queue takes them."""
    client = pods_client
    pace = Pace(data, BATCH_S)
    plain = small_task(TASK, data / "corpus.txt", steps=STEPS)
    client.submit(in_container(pace.of(plain)))
    client.until_step(TASK, 3, HEALED_S)
    before = {rank["worker"]: rank["pid"] for rank in on_nodes(client, set(NODES))["ranks"]}

    status, seconds = running.pods["n1"].delete()
    print(f"\npreStop to the end of the pod: {seconds:.1f} s", end="")
    assert status == 0
    assert client.http.get("/v1/nodes/n1").json()["state"] == "left"
    after = {rank["worker"]: rank["pid"] for rank in client.task(TASK)["ranks"]}
    assert after == {worker: pid for worker, pid in before.items() if worker.startswith("n0/")}
    moved = [one["event"] for one in client.items("/v1/events") if one["type"] == "state.moved"]
    drained = max(index for index, event in enumerate(moved) if event["phase"] == "drained")
    restored = next(event for event in moved[drained:] if event["phase"] == "restored")
    assert restored["step"] == moved[drained]["step"] + 1
    assert {event["steps_recomputed"] for event in moved} == {0}
    check_no_incident(client)

    running.pods["n1"].replace()
    on_nodes(client, set(NODES))
    check_no_incident(client)

    with ThreadPoolExecutor(len(NODES)) as threads:
        ended = list(threads.map(lambda node: running.pods[node].delete(), NODES))
    print(f"\nof both pods: {max(seconds for _, seconds in ended):.1f} s", end="")
    assert [status for status, _ in ended] == [0, 0]
    assert {node["name"]: node["state"] for node in client.items("/v1/nodes")} == dict.fromkeys(NODES, "left")
    assert client.task(TASK)["state"] == "queued"
    for node in NODES:
        running.pods[node].replace()
    on_nodes(client, set(NODES))
    pace.end()
    result = client.until_state(TASK, "succeeded", NODE_BACK_S)["result"]
    parameters, samples = reference(plain, tmp_path / "reference")
    assert (result["steps"], result["samples_sha256"]) == (STEPS, samples)
    assert compare_parameters(fetched(client, tmp_path), parameters) <= TOLERANCE
    moved = [one["event"] for one in client.items("/v1/events") if one["type"] == "state.moved"]
    assert {event["steps_recomputed"] for event in moved} == {0}
    # Where the second drain is decided before the first is known to have released its workers, its plan fails, and
    # loses nothing (docs/transition.md).
    details = [str(one["evidence"].get("detail")) for one in client.items("/v1/incidents")]
    assert [detail for detail in details if not detail.startswith("released:")] == []
