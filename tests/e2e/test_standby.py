"""Services that stand by: whichever of a pair is killed or stopped while a rank dies, the other answers, once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.stack.children import DECIDING, STANDBYS
from cli.stack.stack import Stack
from services.planner.replay.replay import verify
from shared.log.lease import Lease
from shared.log.log import EventLog
from tests.e2e.kit import Client, Pace, Record, at, processes_of, small_task

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

PAIR_OF = {service: name for name, service in STANDBYS.items()}


class Pairs:
    """A stack with standbys, in which one task trains."""

    def __init__(self, stack: Stack, client: Client, log_url: str = "") -> None:
        self.stack, self.client = stack, client
        self._log_url = log_url or f"sqlite:///{stack.run_dir / 'log.db'}"

    def lease(self, service: str) -> Lease:
        with closing(EventLog(self._log_url, read_only=True)) as log:
            return log.leases()[service]

    def instances(self, service: str) -> list[Record]:
        """The processes of a service, the active one first."""
        checks = self.client.http.get("/v1/status").json()["checks"]
        found: list[Record] = next(check["instances"] for check in checks if check["name"] == service)
        return found

    def has_both(self, service: str) -> bool:
        return [one["active"] for one in self.instances(service)] == [True, False]

    def signal_active(self, service: str, signum: signal.Signals) -> int:
        """Send a signal to the active process; return its pid."""
        pid = int(self.lease(service).holder.split("/")[1])
        os.kill(pid, signum)
        return pid

    def kill_rank(self) -> None:
        """Kill a rank of the task."""
        pids = [rank["pid"] for rank in self.client.task("a")["ranks"]]
        os.kill(pids[-1], signal.SIGKILL)

    def incidents(self) -> list[Record]:
        return self.client.incidents("a")

    def restored(self, number: int) -> Record | None:
        """The last of so many incidents, once it is over."""
        found = self.incidents()
        assert len(found) <= number, found
        return found[-1] if len(found) == number and found[-1]["restored_at"] else None


@pytest.fixture(params=["sqlite", "postgresql"])
def log_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of the stack's log, in either database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'run' / 'log.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
async def stack(tmp_path: Path, log_url: str) -> AsyncIterator[Stack]:
    run_dir = tmp_path / "run"
    environment = {"UNICRON_LOG_URL": log_url}
    async with Stack(run_dir, nodes=3, workers_per_node=1, standby=True, environment=environment) as started:
        yield started
    assert processes_of(run_dir) == []
    assert [path.name for path in run_dir.glob("services/*.log") if "Traceback" in path.read_text()] == []
    with closing(EventLog(log_url, read_only=True)) as log:
        report = verify(log)
    # Every plan, whoever made it, is byte for byte the one that the log alone leads to.
    assert report.ok
    assert report.verified == report.plans > 0


def show(**times: Any) -> None:
    print(" ".join(f"{name}={value}" for name, value in times.items()))


async def test_whichever_active_service_ends_or_stops_while_a_rank_dies(
    stack: Stack, log_url: str, corpus: Path, tmp_path: Path
) -> None:
    def course() -> None:
        with Client(stack.url) as client:
            pairs, pace = Pairs(stack, client, log_url), Pace(tmp_path, 0.03)
            client.submit(pace.of(small_task("a", corpus, steps=4000, workers={"min": 3, "max": 3})))
            client.until_step("a", 5)
            number = 0
            for signum in (signal.SIGKILL, signal.SIGSTOP):
                for service in DECIDING:
                    number += 1
                    client.until(f"both of {service}", partial(pairs.has_both, service))
                    client.until_state("a", "running")
                    client.until_step("a", client.task("a")["step"] + 3)
                    before = pairs.lease(service)
                    pid = pairs.signal_active(service, signum)
                    pairs.kill_rank()
                    incident = client.until("it is restored", partial(pairs.restored, number))
                    assert pairs.lease(service).token > before.token
                    show(
                        service=service,
                        signal=signum.name,
                        planned_s=round(at(incident, "planned_at") - at(incident, "occurred_at"), 2),
                        restored_s=round(at(incident, "restored_at") - at(incident, "occurred_at"), 2),
                    )
                    if signum == signal.SIGSTOP:
                        os.kill(pid, signal.SIGCONT)
            for service in DECIDING:
                client.until(f"both of {service}", partial(pairs.has_both, service))
            assert len(pairs.incidents()) == number
            pace.end()
            client.http.post("/v1/tasks/a/stop").raise_for_status()
            client.until_state("a", "stopped")

    await asyncio.to_thread(course)
