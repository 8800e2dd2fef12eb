"""Machines reach one another through the switch, with the delay, loss and cuts that were asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cluster import echo
from tests.cluster.machine import Machine, Process
from tests.cluster.network import ROOT, Network
from tests.condition import until_blocking

pytestmark = pytest.mark.cluster

PORT = 5000
HOSTS = "127.0.0.1 localhost\n"


@dataclass(frozen=True)
class Trio:
    """Three machines, each with an echo server."""

    network: Network
    machines: list[Machine]
    servers: list[Process]


@pytest.fixture(scope="module")
def running_trio(cluster_host: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Machines for all tests of this file; tests take them as ``trio``."""
    folder = tmp_path_factory.mktemp("trio")
    with Network(seed=1) as network:
        machines = [Machine(f"m{i}", 11 + i, network, folder / f"m{i}", hosts=HOSTS) for i in range(3)]
        for machine in machines:
            machine.power_on()
        for machine in machines:
            machine.wait_ready()
        yield Trio(network, machines, [serve(machine) for machine in machines])
        for machine in machines:
            machine.power_off()


@pytest.fixture
def trio(running_trio: Trio) -> Iterator[Trio]:
    """Three machines and their network, which is whole again after the test."""
    yield running_trio
    running_trio.network.heal()


def serve(machine: Machine) -> Process:
    server = machine.start([sys.executable, echo.__file__, "serve", str(PORT)], output="echo.log")
    machine.wait_for_line(server, "ready", 20)
    return server


def heard(server: Process) -> int:
    """Return how many questions came through."""
    return server.output.read_text().count("heard")


def ask(source: Machine, target: Machine, count: int, timeout_s: float) -> list[float | None]:
    """Return the round-trip times of some questions."""
    command = [sys.executable, echo.__file__, "ask", target.address, str(PORT), str(count), str(timeout_s)]
    times: list[float | None] = json.loads(source.run(command, output="ask.log"))
    return times


def reaches(source: Machine, target: Machine) -> bool:
    """Return whether a question is answered; the first ones may be lost while the Ethernet address is sought.

    None of these questions is under way any more when this returns.
    """
    answered = any(s is not None for s in ask(source, target, count=20, timeout_s=1.0))
    return answered and ask(source, target, count=1, timeout_s=20.0) != [None]


def loses_all(source: Machine, target: Machine) -> bool:
    return ask(source, target, count=3, timeout_s=0.3) == [None, None, None]


def test_each_direction_has_its_own_delay(trio: Trio) -> None:
    network, (m0, m1, _) = trio.network, trio.machines
    assert reaches(m0, m1)
    network.set("m0", "m1", delay_s=0.2)
    network.set("m1", "m0", delay_s=0.1)
    times = [s for s in ask(m0, m1, count=3, timeout_s=10.0) if s is not None]
    assert len(times) == 3
    assert min(times) >= 0.3
    # Generous: a busy machine may let the switch or the server wait.
    assert max(times) < 9.0


def test_loss_in_one_direction(trio: Trio) -> None:
    network, (m0, m1, _), server = trio.network, trio.machines, trio.servers[1]
    assert reaches(m0, m1)  # and each knows the other's Ethernet address
    before = heard(server)
    network.set("m0", "m1", loss=1.0)
    assert loses_all(m0, m1)
    assert heard(server) == before, "no question came through"
    network.set("m0", "m1")
    network.set("m1", "m0", loss=1.0)
    assert loses_all(m0, m1)
    until_blocking(lambda: heard(server) == before + 3, "the questions came through, no answer did", limit_s=20.0)
    network.heal()
    assert reaches(m0, m1)


def test_a_part_of_the_frames_is_lost_at_random(trio: Trio) -> None:
    network, (m0, m1, _), server = trio.network, trio.machines, trio.servers[1]
    assert reaches(m0, m1)
    before = heard(server)
    network.set("m0", "m1", loss=0.5)
    ask(m0, m1, count=40, timeout_s=0.05)
    _, dropped = network.count("m0", "m1")
    network.heal()
    assert ask(m0, m1, count=1, timeout_s=20.0) != [None]  # and the server has heard all that came before
    # Of 40 fair draws fewer than 5, or more than 35, come once in ten million times; the seed is fixed besides.
    assert 5 <= heard(server) - before - 1 <= 35
    assert dropped >= 5


def test_a_cut_between_two_leaves_the_others(trio: Trio) -> None:
    network, (m0, m1, m2) = trio.network, trio.machines
    network.between("m0", "m1", cut=True)
    assert loses_all(m0, m1)
    assert loses_all(m1, m0)
    assert reaches(m0, m2)
    assert reaches(m2, m0)
    assert reaches(m1, m2)
    network.heal()
    assert reaches(m0, m1)
    network.isolate("m2")
    assert loses_all(m0, m2)
    assert loses_all(m2, m1)
    assert reaches(m1, m0)


def test_a_machine_has_its_own_name_hosts_memory_and_disk(network: Network, tmp_path: Path) -> None:
    hosts = "127.0.0.1 localhost\n127.0.1.1 m0.example.org m0\n"
    machine = Machine(
        "m0",
        11,
        network,
        tmp_path / "m0",
        hosts=hosts,
        hostname="m0.example.org",
        memory_bytes=1 << 20,
        disk_bytes=2 << 20,
    )
    machine.power_on()
    machine.wait_ready()
    try:
        script = (
            "import os, shutil, socket; print(socket.gethostname(), socket.gethostbyname('m0'),"
            " shutil.disk_usage('/dev/shm').total, shutil.disk_usage('/run').total, os.listdir('/run'),"
            " sorted(name for _, name in socket.if_nameindex()), os.getppid())"
        )
        printed = machine.run([sys.executable, "-c", script], output="tell.log")
        assert printed == f"m0.example.org 127.0.1.1 {1 << 20} {2 << 20} [] ['eth0', 'lo'] 1\n"
        machine.run(["sh", "-c", "echo seen > /run/file"], output="write.log")
        assert machine.path("/run/file").read_text() == "seen\n"
        assert not Path("/run/file").exists()
    finally:
        machine.power_off()


KILLED = """
import pathlib, sys, time
from tests.cluster.machine import Machine
from tests.cluster.network import Network

network = Network()
machine = Machine("m0", 11, network, pathlib.Path(sys.argv[1]), hosts="")
machine.power_on()
machine.wait_ready()
machine.start(["sh", "-c", "sleep 1000 & exec sleep 1000"], output="sleep.log")
print("ready", flush=True)
time.sleep(1000)
"""


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_nothing_outlives_a_killed_test_process(tmp_path: Path) -> None:
    """Neither the switch nor a machine, nor what runs on it."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "m0")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            below: list[psutil.Process] = []
            # The switch, the machine's first process and the one that waits for it, two of sleep.
            while len(below) < 5:
                below = psutil.Process(process.pid).children(recursive=True)
        finally:
            process.kill()
    until_blocking(lambda: not any(alive(p) for p in below), "all processes end", limit_s=20)
