"""docker-compose.yml as it runs: rights, health, and a task that is healed of a fault of each kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cli.demo.report import TOLERANCE, compare_parameters
from services.agent.files.rank_users import NEEDED
from tests.containers import images
from tests.containers.compose import Project, waves
from tests.containers.page import Page
from tests.containers.podman import inspected
from tests.e2e.kit import Client, Pace, Record, reference, small_task

BUILD_AND_START_S = 3600
"""The first test waits for images, which are built from nothing the first time."""

HEALED_S = 120.0
"""From a fault to the end of its incident: seconds, and on two busy cores ten times as long."""

NODE_BACK_S = 240.0
"""A container that starts imports torch before its node is used again."""

CONTROL_MB = 150
"""Most that the control plane adds to its base image."""

RANK_UIDS = range(1_000_000_000, 2_000_000_000)
"""docker-compose.yml, RANK_UIDS."""

TASK = "gpt-small"
"""The page's."""

STEPS = 200
"""Of the task: more than it does at its pace while the faults last."""

BATCH_S = 0.1
"""Pace of the task: a step of four ranks takes 0.2 s at least."""

BY_FIXTURES = (
    "docker compose build",
    "docker compose --profile setup run --rm keys",
    "docker compose up --detach --wait",
    "docker compose down --volumes",
)
"""The page's commands around a test. podman needs to be told more to build here, and cannot wait for health."""

pytestmark = [pytest.mark.containers, pytest.mark.timeout(BUILD_AND_START_S)]

SERVICES = [name for services in waves() for name in services]
AGENTS = {"agent-n0", "agent-n1"}
WORKERS = 4
"""Two of each agent."""


def status_of(project: Project, service: str, pid: int = 1) -> dict[str, str]:
    """Return what proc(5) says of a process in a container."""
    program = f"import pathlib; print(pathlib.Path('/proc/{pid}/status').read_text())"
    shell = ("python", "-P", "-c", program) if service not in ("nats", "postgres") else ("cat", f"/proc/{pid}/status")
    lines = project.execute(service, *shell).splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_the_control_plane_is_small(built: dict[str, str]) -> None:
    control, base = (images.size_bytes(built[name]) for name in ("CONTROL_IMAGE", "BASE_IMAGE"))
    assert (control - base) / 1e6 <= CONTROL_MB


def test_the_control_image_has_neither_compiler_nor_server_nor_pip(project: Project) -> None:
    program = (
        "import importlib.util as u; print([n for n in ('numba', 'torch', 'pip', 'setuptools') if u.find_spec(n)])"
    )
    assert project.execute("api", "python", "-P", "-c", program).split() == ["[]"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_has_the_rights_that_it_needs_and_no_more(project: Project, service: str) -> None:
    status = status_of(project, service)
    allowed = sum(1 << bit for bit in NEEDED) if service in AGENTS else 0
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == allowed
    assert status["NoNewPrivs"] == "1"
    assert (status["Uid"].split()[0] == "0") == (service in {*AGENTS, "nats"})
    assert inspected("container", project.container(service))["HostConfig"]["ReadonlyRootfs"]


def test_the_api_asks_for_a_token(client: Client) -> None:
    url = str(client.http.base_url.join("/v1/tasks"))
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"Authorization": "Bearer unicron_wrong"}).status_code == 401
    assert client.http.get("/v1/tasks").status_code == 200
    assert client.http.get("/readyz").status_code == 200


def test_the_walk_from_nothing_to_a_healed_fault(project: Project, client: Client, data: Path, tmp_path: Path) -> None:
    """The commands of docs/deploy/compose.md, on a task that trains until the faults are over.

    A rank is killed, then a whole container; the result is that of a training without faults.
    """
    page = Page(project)
    for command in BY_FIXTURES:
        page.take(command)
    assert page.run("docker compose exec api unicron nodes").count("ready") == WORKERS

    pace = Pace(data, BATCH_S)
    plain = small_task(TASK, data / "corpus.txt", steps=STEPS)
    page.run("docker compose exec -T api unicron submit -", stdin=json.dumps(in_container(pace.of(plain))))
    client.until_step(TASK, 3, HEALED_S)
    ranks = on_nodes(client, {"n0", "n1"})["ranks"]
    pid = next(rank["pid"] for rank in ranks if rank["node"] == "n0")

    status = status_of(project, "agent-n0", pid)
    assert all(int(uid) in RANK_UIDS for uid in status["Uid"].split())
    assert (int(status["CapEff"], 16), status["NoNewPrivs"]) == (0, "1")
    assert str(pid) in page.run(f"docker compose exec api unicron show {TASK}")
    page.run("docker compose exec agent-n0 python -P -c 'import os; os.kill(PID, 9)'", PID=pid)
    healed = client.until_restored("process-exit", limit_s=HEALED_S, task=TASK)
    assert (healed["severity"], healed["steps_recomputed"]) == ("SEV2", 0)
    assert "process-exit" in page.run("docker compose exec api unicron incidents")

    page.run("docker compose kill agent-n1")
    lost = client.until_restored("node-lost", limit_s=HEALED_S, node="n1")
    assert lost["severity"] == "SEV1"
    assert "node-lost" in page.run("docker compose exec api unicron cost")
    page.run("docker compose up --detach agent-n1")
    on_nodes(client, {"n0", "n1"})
    assert TASK in page.run("docker compose exec api unicron ps")
    assert page.left == []

    pace.end()
    result = client.until_state(TASK, "succeeded", HEALED_S)["result"]
    parameters, samples = reference(plain, tmp_path / "reference")
    assert (result["steps"], result["samples_sha256"]) == (STEPS, samples)
    assert compare_parameters(fetched(client, tmp_path), parameters) <= TOLERANCE


def in_container(spec: Record) -> Record:
    """Return a specification with its paths as the nodes have them."""
    return spec | {
        "data": "/data/corpus.txt",
        "script": "/data/paced.py",
        "env": {**spec["env"], "PACE": "/data/pace"},
    }


def on_nodes(client: Client, nodes: set[str]) -> Record:
    """Wait until the task trains on these nodes; return it."""

    def trains() -> Record | None:
        task = client.task(TASK)
        assert task["state"] != "failed", task
        return task if {rank["node"] for rank in task["ranks"]} == nodes else None

    task: Record = client.until(f"the task trains on {sorted(nodes)}", trains, NODE_BACK_S)
    return task


def fetched(client: Client, folder: Path) -> Path:
    """Fetch the task's parameters with the command line; return their file."""
    file = folder / "gpt.safetensors"
    token = client.http.headers["Authorization"].removeprefix("Bearer ")
    subprocess.run(
        [sys.executable, "-P", "-m", "cli.main", "result", TASK, str(file), "--server", str(client.http.base_url)],
        env={**os.environ, "UNICRON_TOKEN": token},
        cwd=images.ROOT,
        check=True,
        timeout=60,
        stdout=subprocess.DEVNULL,
    )
    return file
