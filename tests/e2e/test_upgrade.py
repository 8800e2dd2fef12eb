"""A rolling upgrade: services and agents of two versions side by side, in either order, and one step back."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

from cli.stack.children import DECIDING
from cli.stack.stack import Stack
from shared.log.log import EventLog
from tests.condition import until_blocking
from tests.e2e import next_version
from tests.e2e.kit import ROOT, Client, Pace, processes_of, small_task
from tests.e2e.test_standby import PAIR_OF, Pairs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_S = 120.0
"""A service that is started again imports its program first, three at a time here."""


class RollingStack(Stack):
    """A stack whose children are of the version that each is said to have."""

    def runs(self, name: str, tree: Path) -> None:
        """Have a child be of a version from its next start on."""
        self._children[name].environment["PYTHONPATH"] = str(tree)


class Upgrade:
    """What an operator does, and the faults meanwhile."""

    def __init__(self, stack: RollingStack, client: Client, new: Path, installed: Path) -> None:
        self.stack, self.client, self.pairs = stack, client, Pairs(stack, client)
        self.old, self.new, self._installed = ROOT, new, installed
        self._faults = 0

    def instances(self, *, active: bool) -> list[str]:
        """The children that are active, or those that stand by."""
        found = []
        for service in DECIDING:
            holder = int(self.pairs.lease(service).holder.split("/")[1])
            pair = service, PAIR_OF[service]
            assert holder in map(self.stack.service_pid, pair)
            found += [name for name in pair if (self.stack.service_pid(name) == holder) is active]
        return found

    def restart(self, names: Iterable[str], tree: Path) -> None:
        """Have some services be of a version, and wait until all pairs are whole."""
        before = {name: self.stack.service_pid(name) for name in names}
        for name in before:
            self.stack.runs(name, tree)
            self.stack.kill_service(name)
        self.client.until(
            "others", lambda: all(self.stack.service_pid(n) not in (None, p) for n, p in before.items()), LIMIT_S
        )
        for service in DECIDING:
            self.client.until(f"both of {service}", partial(self.pairs.has_both, service), LIMIT_S)

    def restart_api(self, tree: Path) -> None:
        """Have the api be of a version."""
        before = self.stack.service_pid("api")
        self.stack.runs("api", tree)
        self.stack.kill_service("api")

        def answers() -> bool:
            with suppress(httpx.TransportError):
                return (
                    self.stack.service_pid("api") not in (None, before) and self.client.http.get("/readyz").is_success
                )
            return False

        until_blocking(answers, "another api", limit_s=LIMIT_S)

    def restart_agents(self, tree: Path) -> None:
        """Have the agents be of a version, node after node."""
        self._installed.write_text(str(tree))
        for node in self.stack.node_names:
            path = f"/v1/nodes/{node}"
            before = self.client.http.get(path).json()["incarnation"]
            self.client.http.post(f"{path}/agent/restart").raise_for_status()

            def replaced(path: str = path, before: str = before) -> bool:
                found = self.client.http.get(path).json()
                return bool(found["incarnation"] != before and found["state"] == "ready")

            self.client.until(f"another agent of {node}", replaced, LIMIT_S)

    def fault(self) -> None:
        """Kill a rank: it is replaced, once."""
        self.client.until_state("a", "running")
        self.client.until_step("a", self.client.task("a")["step"] + 3)
        self.pairs.kill_rank()
        self._faults += 1
        self.client.until("it is restored", partial(self.pairs.restored, self._faults), LIMIT_S)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A file with the folder of the version that a node's processes are of when they start.

    A fork server stays with its own, and so do the ranks of a task: they have one library among them.
    """
    found = tmp_path / "program" / "installed"
    found.parent.mkdir()
    found.write_text(str(ROOT))
    first = f"import pathlib, sys\nsys.path.insert(0, pathlib.Path({str(found)!r}).read_text())\n"
    (found.parent / "sitecustomize.py").write_text(first)
    return found


@pytest.fixture
async def stack(tmp_path: Path, installed: Path) -> AsyncIterator[RollingStack]:
    run_dir = tmp_path / "run"
    environment = {"PYTHONPATH": str(installed.parent)}
    async with RollingStack(run_dir, nodes=3, workers_per_node=1, standby=True, environment=environment) as started:
        yield started
    assert processes_of(run_dir) == []
    words = ("Traceback", "newer-version", "older-version", "undecodable", "was dropped")
    found = [(path.name, word) for path in run_dir.glob("services/*.log") for word in words if word in path.read_text()]
    assert found == []


def verified(run_dir: Path, tree: Path) -> dict[str, object]:
    """Verify the log with a version of the program."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cli.main", "replay", str(run_dir / "log.db"), "--verify", "-o", "json"],
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    report: dict[str, object] = json.loads(done.stdout or done.stderr)
    return {**report, "status": done.returncode}


async def test_two_versions_side_by_side_in_either_order_and_one_step_back(
    stack: RollingStack, corpus: Path, tmp_path: Path, installed: Path
) -> None:
    new = next_version.make(tmp_path / "next")

    def course() -> None:
        with Client(stack.url) as client:
            upgrade, pace = Upgrade(stack, client, new, installed), Pace(tmp_path, 0.03)
            client.submit(pace.of(small_task("a", corpus, steps=9000, workers={"min": 3, "max": 3})))
            client.until_step("a", 5)
            # The services first: the new ones stand by, then are active, and the old ones stand by behind them.
            upgrade.restart(upgrade.instances(active=False), upgrade.new)
            upgrade.fault()
            upgrade.restart(upgrade.instances(active=True), upgrade.old)
            upgrade.fault()
            # One step back: the old ones are active again, behind what the new ones have written.
            upgrade.restart(upgrade.instances(active=True), upgrade.new)
            upgrade.fault()
            # All of it.
            upgrade.restart(upgrade.instances(active=True), upgrade.new)
            upgrade.restart_api(upgrade.new)
            upgrade.restart_agents(upgrade.new)
            upgrade.fault()
            # The services back: as if the agents had been the first.
            for active in (False, True):
                upgrade.restart(upgrade.instances(active=active), upgrade.old)
            upgrade.fault()
            pace.end()
            client.http.post("/v1/tasks/a/stop").raise_for_status()
            client.until_state("a", "stopped")

    await asyncio.to_thread(course)
    with closing(EventLog(f"sqlite:///{stack.run_dir / 'log.db'}", read_only=True)) as log:
        versions = {(row.type, row.schema_version) for row in log.rows()}
        deciders = [record.event.decider for record in log.read(types=["plan.decided"])]  # type: ignore[union-attr]
    assert {version for kind, version in versions if kind == "error.detected"} == {1, 2}
    assert len(set(deciders)) == 2
    assert sorted(deciders) != deciders, "the one before has decided again"
    report = await asyncio.to_thread(verified, stack.run_dir, new)
    assert report["status"] == 0, report
