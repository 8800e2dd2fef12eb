"""The preflight's all-reduce with a neighbour, between machines: the one behind slow links is found, and no other."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import pytest

from shared.events.measurements import Measurement, Rate
from shared.preflight.judgement import LEAST_LIKE, judge
from tests.cluster.holder import INTERFACE
from tests.cluster.machine import Machine
from tests.cluster.network import Network

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PORT = 5000

DELAY_S = 0.1
"""Of each direction of a slow link: an all-reduce of two steps takes longer than this, and milliseconds without it."""

PART_S = 120.0
"""For torch's import on a busy machine, too, by which the two may differ."""

LISTENS = """
import os, socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
os.set_inheritable(listener.fileno(), True)
request = sys.argv[-1].replace('"fd": null', f'"fd": {listener.fileno()}')
os.execv(sys.executable, [sys.executable, *sys.argv[3:-1], request])
"""
"""Starts the program with a listening socket, as an agent does."""


def measured(one: Machine, other: Machine) -> float:
    """Return the rate between two machines, in bytes per second, of which the first one has the store."""
    place = {"host": one.address, "port": PORT, "fd": None}
    request = json.dumps({"neighbour": place, "devices": 0, "part_s": PART_S})
    program = ["-P", "-m", "unicron.process.preflight", request]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE}
    listens = [sys.executable, "-c", LISTENS, one.address, str(PORT), *program]
    first = one.start(listens, output="first.log", environment=environment)
    second = other.start([sys.executable, *program], output="second.log", environment=environment)
    for machine, process in ((one, first), (other, second)):
        assert machine.wait(process, PART_S + 60.0) == 0
    text = (other.folder / "second.log").read_text().splitlines()[-1]
    return float(json.loads(text)["value"])


def test_a_node_behind_slow_links_is_refused_and_its_neighbours_are_not(network: Network, tmp_path: Path) -> None:
    machines = [Machine(f"m{i}", 11 + i, network, tmp_path / f"m{i}", hosts="127.0.0.1 localhost\n") for i in range(3)]
    try:
        for machine in machines:
            machine.power_on()
        for machine in machines:
            machine.wait_ready()
        for name in ("m0", "m1"):
            network.between(name, "m2", delay_s=DELAY_S)
        rates: dict[str, list[Rate]] = {machine.name: [] for machine in machines}
        for one, other in itertools.combinations(machines, 2):
            value = measured(one, other)
            for node, peer in ((one, other), (other, one)):
                rates[node.name].append(Rate(quantity="all-reduce with a neighbour", value=value, peer=peer.name))
    finally:
        for machine in machines:
            machine.power_off()
    print({name: [rate.value for rate in found] for name, found in rates.items()})
    whole = Measurement(device="a", count=1, rates=rates["m0"][:1])
    verdicts = {
        name: judge(whole.model_copy(update={"rates": found}), [whole] * LEAST_LIKE).verdict
        for name, found in rates.items()
    }
    assert verdicts == {"m0": "accepted", "m1": "accepted", "m2": "refused"}
