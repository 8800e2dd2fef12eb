"""``unicron doctor`` on a node beside others: it names the slow link, and the one that is cut."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster.bed import Bed
from tests.cluster.control import service_environment
from tests.cluster.machine import Machine

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

DOCTOR = [sys.executable, "-P", "-m", "cli.main", "doctor"]

PORT = 7642

LIMIT_S = 90.0
"""Generous: a doctor measures a peer for seconds, and waits ten for one that does not answer."""

SLOW_S = 0.1
"""Delay in each direction: a round trip of 0.2 s, which also keeps TCP far below the rate of the other pair."""


@contextmanager
def listening(machine: Machine) -> Iterator[str]:
    """Have a machine's doctor answer others; yield its address."""
    bind = f"{machine.address}:{PORT}"
    process = machine.start(
        [*DOCTOR, "--listen", "--bind", bind], output="doctor.log", environment=service_environment()
    )
    machine.wait_for_line(process, f"listening {bind}", LIMIT_S)
    try:
        yield bind
    finally:
        machine.signal(process.pid, signal.SIGTERM)
        assert machine.wait(process, LIMIT_S) == 0


def checked(bed: Bed, node: str, *peers: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run a node's doctor; return its exit status, and its findings by check."""
    machine = bed.nodes[node]
    environment = service_environment(UNICRON_NATS_CREDENTIAL=bed.control.node_credential(node))
    arguments = [argument for peer in peers for argument in ("--peer", peer)]
    output = f"doctor-{len(list(machine.folder.glob('doctor-*')))}.json"
    process = machine.start([*DOCTOR, "-o", "json", *arguments], output=output, environment=environment)
    code = machine.wait(process, LIMIT_S)
    findings = json.loads(process.output.read_text())["findings"]
    return code, {one["check"]: one for one in findings}


def test_a_slow_link_and_a_cut_one_are_found_and_named(bed: Bed) -> None:
    with listening(bed.nodes["n1"]) as n1, listening(bed.nodes["n2"]) as n2:
        code, good = checked(bed, "n0", n1, n2)
        assert code == 0
        assert "answers in" in good["NATS"]["finding"]
        assert good["address"]["finding"].startswith("198.51.100.")
        assert good["name"]["finding"].startswith("n0; n0.example.org is a loopback address here")
        bed.network.between("n0", "n2", delay_s=SLOW_S)
        code, slow = checked(bed, "n0", n1, n2)
        assert code == 0
        assert slow[f"peer {n2}"]["verdict"] == "warning"
        assert "look at this link" in slow[f"peer {n2}"]["advice"]
        assert float(slow[f"peer {n2}"]["finding"].split()[0]) >= 2 * SLOW_S * 1e3
        bed.network.between("n0", "n2", cut=True)
        code, cut = checked(bed, "n0", n1, n2)
        assert code == 1
        assert [check for check, one in cut.items() if one["verdict"] == "failed"] == [f"peer {n2}"]
