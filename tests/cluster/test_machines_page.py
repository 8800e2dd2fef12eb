"""docs/deploy/machines.md, command by command, on three machines: from nothing to a healed fault.

A node whose unit is stopped as systemd stops it has lost and recomputed no step.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster.bed import CONTROL, hosts_file
from tests.cluster.control import Control
from tests.cluster.holder import DISK
from tests.cluster.machine import Machine
from tests.cluster.machines_page import MachinesPage
from tests.cluster.network import Network
from tests.cluster.recorded import Recorded
from tests.cluster.units import SHARED, UnitMachine
from tests.e2e.kit import Client, Pace, Record, small_task
from tests.postgres import find_binaries

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

TASK = "gpt-small"
NODES = ("n0", "n1")
NUMBERS = {CONTROL: 1, "n0": 11, "n1": 12}

READY_S = 120.0
"""An agent's fork server imports torch for 5 to 10 s; all machines share the cores."""


@contextmanager
def powered(folder: Path) -> Iterator[dict[str, Machine]]:
    """Run the machines, bare."""
    with Network(seed=0) as network, ExitStack() as stack:
        machines = {
            name: Machine(name, number, network, folder / name, hosts=hosts_file(name, NUMBERS))
            for name, number in NUMBERS.items()
        }
        for machine in machines.values():
            stack.callback(machine.power_off)
            machine.power_on()
        for machine in machines.values():
            machine.wait_ready()
        yield machines


@pytest.fixture
def machines(tmp_path: Path, task: Pace) -> Iterator[dict[str, UnitMachine]]:
    """Three machines, and PostgreSQL on one of them."""
    shared = tmp_path / "shared"
    binaries = find_binaries()
    # psql finds the server by these, and is found itself.
    variables = {CONTROL: {"PGHOST": DISK, "PATH": f"{binaries}:{os.environ['PATH']}"}}
    with powered(tmp_path) as made:
        database = Control(made[CONTROL], {}, ())
        database.make_database_cluster()
        database.start_postgres()
        yield {
            name: UnitMachine(machine, shared, tmp_path / "examples", variables.get(name, {}))
            for name, machine in made.items()
        }


@pytest.fixture
def task(tmp_path: Path) -> Pace:
    """The example that the page submits: one that lasts until the test lets it end."""
    examples, shared = tmp_path / "examples", tmp_path / "shared"
    examples.mkdir()
    shared.mkdir()
    shared.chmod(0o777)
    pace = Pace(shared, 0.05)
    spec = pace.of(small_task(TASK, Path("corpus.txt"), steps=400, workers={"min": 1, "max": 4}))
    lines = {**spec, "script": f"{SHARED}/paced.py", "env": {**spec["env"], "PACE": f"{SHARED}/pace"}}
    text = "".join(
        f"{name}: {value}\n" if name == "data" else f"{name}: {_flow(value)}\n" for name, value in lines.items()
    )
    (examples / f"{TASK}.yaml").write_text(text)
    return pace


def _flow(value: object) -> str:
    """Return a value as YAML on one line, in which JSON is a part of it."""
    return json.dumps(value)


def scp(command: str, machines: Mapping[str, UnitMachine]) -> None:
    """Copy a file to another machine as ``scp`` does, with the bits of its mode."""
    _, source, target = shlex.split(command)
    node, _, path = target.partition(":")
    file, copy = machines[CONTROL].path(source), machines[node].path(path)
    copy.touch(mode=file.stat().st_mode & 0o777)
    copy.write_bytes(file.read_bytes())


def trains_on(client: Client, *nodes: str) -> Record:
    """Wait until the task trains on these nodes; return it."""

    def trains() -> Record | None:
        found = client.task(TASK)
        assert found["state"] != "failed", found
        return found if {rank["node"] for rank in found["ranks"]} == {*nodes} else None

    record: Record = client.until(f"the task trains on {nodes}", trains, READY_S)
    return record


def states(client: Client) -> dict[str, str]:
    return {node["name"]: node["state"] for node in client.items("/v1/nodes")}


def test_the_page(machines: dict[str, UnitMachine], task: Pace, tmp_path: Path) -> None:
    page, control = MachinesPage(), machines[CONTROL]
    page.take(2, "git clone")
    for command in [*page.take(6, "mkdir"), *page.take(2, "export LOG_PASSWORD"), *page.take(5, "useradd")]:
        control.run(command)
    control.wait_for_line("unicron-control", "ready http://127.0.0.1:8642")
    control.run(page.one("mkdir -m 1777"))
    for command in page.take(3, "mkdir -p"):
        for node in NODES:
            machines[node].run(command)
    for command in page.take(2, ".venv/bin/unicron node add"):
        control.run(command)
    for command in page.take(2, "scp"):
        scp(command, machines)
    for command in page.take(2, "systemctl daemon-reload"):
        for node in NODES:
            machines[node].run(command)

    database = Control(control.machine, {}, ())
    database.start_relay()
    with Client("http://localhost", transport=database.transport()) as client:
        client.until("all nodes are ready", lambda: states(client) == dict.fromkeys(NODES, "ready"), READY_S)
        shown = [control.run(command) for command in page.take(4, ".venv/bin/unicron nodes")]
        assert all(node in shown[0] for node in NODES)
        client.until_step(TASK, 3, READY_S)
        before = trains_on(client, *NODES)
        recorded = Recorded(client)

        # A rank is killed.
        kill = page.one("kill -9")
        pid = next(rank["pid"] for rank in before["ranks"] if rank["node"] == "n0")
        assert str(pid) in control.run(f".venv/bin/unicron show {TASK}")
        status = machines["n0"].path(f"/proc/{pid}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        assert "Uid:\t0" not in status
        machines["n0"].run(kill.replace("PID", str(pid)))
        healed = client.until_restored("process-exit", task=TASK)
        assert healed["steps_recomputed"] == 0
        assert "process-exit" in control.run(page.one(".venv/bin/unicron incidents"))

        # A node is stopped.
        before = trains_on(client, *NODES)
        errors, moves = recorded.events("error.detected"), len(recorded.events("state.moved"))
        kept = {rank["worker"]: rank["pid"] for rank in before["ranks"] if rank["node"] == "n0"}
        machines["n1"].run(page.one("systemctl stop"))
        assert machines["n1"].status("unicron-agent") == 0
        assert machines["n1"].processes("unicron-agent") == []
        after = trains_on(client, "n0")
        assert {rank["worker"]: rank["pid"] for rank in after["ranks"]} == kept
        assert states(client)["n1"] == "left"
        assert recorded.events("error.detected") == errors
        moved = {event["phase"]: event for event in recorded.events("state.moved")[moves:]}
        assert moved["restored"]["step"] == moved["drained"]["step"] + 1
        assert {event["steps_recomputed"] for event in moved.values()} == {0}
        client.until_step(TASK, after["step"] + 1)
        machines["n1"].run(page.one("systemctl start"))
        trains_on(client, *NODES)

        # A node is lost, and returns.
        machines["n1"].run(page.one("systemctl kill"))
        lost = client.until_restored("node-lost", limit_s=READY_S, node="n1")
        assert lost["severity"] == "SEV1"
        trains_on(client, *NODES)
        assert "node-lost" in control.run(page.one(".venv/bin/unicron incidents"))
        assert TASK in control.run(page.one(".venv/bin/unicron cost"))
        assert page.left == []

        task.end()
        result = client.until_state(TASK, "succeeded", READY_S)["result"]
        assert result["steps"] == 400
        for node in NODES:
            machines[node].run("systemctl disable --now unicron-agent")
        control.run("systemctl disable --now unicron-control unicron-nats")
        assert control.status("unicron-control") == 0
