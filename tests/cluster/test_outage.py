"""PostgreSQL, NATS or a service goes away under training: all wait and go on, and a fault meanwhile is healed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.stack.children import SERVICES
from shared.events.union import ErrorDetected
from tests.cluster.bed import Bed
from tests.cluster.training import training
from tests.condition import until_blocking
from tests.e2e.kit import Record, pids, rank

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

DECIDING = {"detector", "planner", "transition"}

BACK_S = 60.0
"""Generous: services look every two seconds at most."""


@contextmanager
def one_fault(bed: Bed, name: str, corpus: Path, folder: Path) -> Iterator[Record]:
    """Train a task; during the body its rank 1 is killed, which is one incident and costs no other process.

    No event is lost or doubled: the log is whole, each fault has one error event and one plan, the bus has every event.
    """
    with training(bed, name, corpus, folder) as before:
        yield before
        incident = bed.client.until_restored("process-exit", task=name)
        victim = rank(before, 1)
        assert (incident["severity"], incident["worker"]) == ("SEV2", victim["worker"])
        assert incident["steps_recomputed"] == 0
        after = pids(bed.client.task(name))
        assert {worker for worker, pid in pids(before).items() if after[worker] != pid} == {victim["worker"]}
    assert [i["id"] for i in bed.client.incidents(name)] == [incident["id"]]
    assert bed.control.ended() == {}
    log = bed.control.open_log()
    try:
        records = list(log.read_all())
        assert log.verify().ok
    finally:
        log.close()
    types = Counter(r.event.type for r in records if getattr(r.event, "incident", None) == incident["id"])
    assert (types["error.detected"], types["plan.decided"]) == (1, 1)
    until_blocking(lambda: bed.control.relayed() >= len(records), "the bus has every event", limit_s=BACK_S)


def kill_rank(bed: Bed, before: Record) -> None:
    victim = rank(before, 1)
    bed.nodes[victim["node"]].kill(victim["pid"])


def waiting_for_the_log(bed: Bed) -> set[str]:
    """Return the services that say so."""
    return {name for name, check in checks(bed).items() if check["detail"].startswith("waiting for the log: ")}


def checks(bed: Bed) -> dict[str, Record]:
    """Return the checks of the readiness by name."""
    return {check["name"]: check for check in bed.client.http.get("/readyz").json()["checks"]}


def test_postgres_is_killed_and_started_again(bed: Bed, corpus: Path, tmp_path: Path) -> None:
    with one_fault(bed, "log-away", corpus, tmp_path) as before:
        bed.control.kill("postgres")
        kill_rank(bed, before)
        # The detector has the signal of the exit, and the others their next look at the log.
        until_blocking(lambda: waiting_for_the_log(bed) == DECIDING, "the services say so", limit_s=BACK_S)
        refused = bed.client.http.get("/v1/tasks")
        assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) > 0
        assert bed.control.ended() == {}
        bed.control.start_postgres()
        until_blocking(lambda: bed.client.http.get("/readyz").status_code == 200, "the api is ready", limit_s=BACK_S)


@pytest.mark.parametrize("lost", [False, True], ids=["kept", "lost"])
def test_nats_is_killed_and_started_again(lost: bool, bed: Bed, corpus: Path, tmp_path: Path) -> None:
    """Without its store too: the log's table has every event."""
    with one_fault(bed, f"bus-away-{'lost' if lost else 'kept'}", corpus, tmp_path) as before:
        bed.control.kill("nats")
        kill_rank(bed, before)
        until_blocking(
            lambda: checks(bed)["bus"]["detail"].startswith("waiting for the bus"), "the api says so", limit_s=BACK_S
        )
        if lost:
            bed.control.lose_nats_data()
        bed.control.start_nats()
        until_blocking(lambda: bed.client.http.get("/readyz").status_code == 200, "the api is ready", limit_s=BACK_S)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_killed_during_a_recovery(name: str, bed: Bed, corpus: Path, tmp_path: Path) -> None:
    """The detector before it has recorded the fault, or a moment after that; the others once the log has it."""
    task = f"without-{name}"
    with one_fault(bed, task, corpus, tmp_path) as before:
        kill_rank(bed, before)
        if name != "detector":
            until_recorded(bed, task)
        bed.control.kill(name)
        bed.control.start_service(name)


def until_recorded(bed: Bed, task: str) -> None:
    """Wait until the log has an error of the task."""
    log = bed.control.open_log()
    try:
        position = 0

        def recorded() -> bool:
            nonlocal position
            records = log.read(after=position)
            position = records[-1].position if records else position
            return any(isinstance(r.event, ErrorDetected) and r.event.task == task for r in records)

        until_blocking(recorded, "the error is in the log", limit_s=BACK_S)
    finally:
        log.close()
