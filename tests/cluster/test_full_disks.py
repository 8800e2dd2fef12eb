"""Disks and memory folders that are full: tasks train on, it shows, and all goes on once there is room."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from shared.errors import Unavailable
from shared.events.union import Event, NodeCordoned, NodeReturned
from shared.log.log import EventLog
from shared.model import utc_now
from tests.cluster.ballast import full
from tests.cluster.bed import Bed
from tests.cluster.holder import DISK
from tests.cluster.outputs import printed
from tests.cluster.recorded import Recorded
from tests.cluster.test_outage import BACK_S, checks, kill_rank, one_fault
from tests.cluster.training import BATCH_S, MODEL, training
from tests.condition import until_blocking
from tests.e2e.kit import Pace, Record, pids, rank, small_task

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NO_ROOM = "No space left on device"

NO_ROOM_FOR_THE_LOG = "Check free disk space"
"""PostgreSQL's hint, whether no byte or a part of a page could be written."""

MEMORY = "/dev/shm"

MEMORY_BYTES, DISK_BYTES = 64 << 20, 320 << 20
"""Enough for the copies of a small model, and for a new database with its write-ahead log; little to fill."""

SETTINGS = {"UNICRON_NODE_TIMEOUT_S": "10"}
"""An agent that gets no processor for seconds, as on a busy test machine, is no subject here."""

EVERY = 5
"""Steps between two checkpoints."""

MANY_STEPS = 10_000
"""More than a task does while a test lasts."""


@pytest.fixture(scope="module")
def own_bed(cluster_host: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Three nodes with small disks and memory folders."""
    folder = tmp_path_factory.mktemp("disks")
    with Bed(folder, memory_bytes=MEMORY_BYTES, disk_bytes=DISK_BYTES, settings=SETTINGS) as started:
        yield started
        assert started.control.ended() == {}


@pytest.fixture
def bed(own_bed: Bed) -> Iterator[Bed]:
    """The bed; after the test its nodes are ready again."""
    yield own_bed
    own_bed.repair()


def test_checkpoints_fail_while_the_disk_is_full(bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path) -> None:
    """Training goes on, the task shows why, a stop is refused; with room the next checkpoint is written."""
    client, name = bed.client, "no-room"
    place = {"every": EVERY, "memory_every": 0}
    spec = small_task(name, corpus, model=MODEL, steps=MANY_STEPS, checkpoint=place, workers={"max": 1})
    client.submit(Pace(tmp_path, BATCH_S / 4).of(spec))
    try:
        before = client.until("a checkpoint is saved", lambda: (t := client.task(name))["saved_step"] and t)
        machine = bed.nodes[rank(before, 0)["node"]]
        with full(machine, DISK):
            shown: Record = client.until("it shows", lambda: (t := client.task(name))["checkpoint_failure"] and t)
            assert NO_ROOM in shown["checkpoint_failure"]["reason"]
            client.http.post(f"/v1/tasks/{name}/stop").raise_for_status()
            refused: Record = client.until("the stop is refused", lambda: client.task(name)["stop_refused"])
            assert NO_ROOM in refused["reason"]
            after = client.until_step(name, refused["step"] + EVERY)
            assert (after["state"], pids(after)) == ("running", pids(before))
        client.until("a checkpoint is saved again", lambda: client.task(name)["saved_step"] > after["step"])
        assert client.task(name)["checkpoint_failure"] is None
        client.http.post(f"/v1/tasks/{name}/stop").raise_for_status()
        stopped = client.until_state(name, "stopped")
        assert stopped["saved_step"] == stopped["step"]
    except BaseException:
        client.http.post(f"/v1/tasks/{name}/stop", json={"lose_steps": True})
        raise
    [*_, last] = recorded.events("task.checkpoint-failed", task=name)
    assert NO_ROOM in last["reason"]
    assert recorded.incidents() == []


def test_a_rank_heals_while_all_disks_are_full(bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path) -> None:
    """Nobody can write a line of output, also not the process that is started; what was left out is named later."""
    with training(bed, "mute", corpus, tmp_path) as before:
        with ExitStack() as disks:
            for machine in bed.nodes.values():
                disks.enter_context(full(machine, DISK))
            victim = rank(before, 1)
            bed.nodes[victim["node"]].kill(victim["pid"])
            incident = recorded.restored()
            assert (incident["kind"], incident["worker"]) == ("process-exit", victim["worker"])
            task = bed.client.until_step("mute", bed.client.task("mute")["step"] + 2)
            others = {w: pid for w, pid in pids(before).items() if w != victim["worker"]}
            assert others.items() <= pids(task).items()
    assert [i["id"] for i in recorded.incidents()] == [incident["id"]]
    assert {worker for worker, _ in printed(bed.client, "mute")} >= others.keys()


def test_copies_fail_while_a_memory_folder_is_full(bed: Bed, recorded: Recorded, corpus: Path, tmp_path: Path) -> None:
    """Training goes on, and the task shows why there are no copies in memory."""
    with full(bed.nodes["n1"], MEMORY), training(bed, "no-copies", corpus, tmp_path) as before:
        shown: Record = bed.client.until("it shows", lambda: bed.client.task("no-copies")["copies_lacking"])
        assert shown["reason"].startswith("no more in-memory copies in this generation: ")
        assert NO_ROOM in shown["reason"]
        assert shown["worker"] == "n1/0"
        after = bed.client.until_step("no-copies", before["step"] + 3)
        assert pids(after) == pids(before)
    assert recorded.incidents() == []


def test_services_wait_while_the_disk_of_the_control_plane_is_full(bed: Bed, corpus: Path, tmp_path: Path) -> None:
    """Training goes on; what the log has no room for is written once there is some, and only once."""
    with one_fault(bed, "no-log", corpus, tmp_path) as before:
        # Opened while there is room: a new session of PostgreSQL may have to write a file first.
        url = f"postgresql+psycopg://postgres@/unicron?host={bed.control.machine.path(DISK)}"
        incarnation = bed.client.http.get("/v1/nodes/n0").json()["incarnation"]
        with closing(EventLog(url)) as log, full(bed.control.machine, DISK):
            fill_log(log, "n0", incarnation)
            kill_rank(bed, before)
            # Which one depends on the sizes of its events, and on the room that is left in each page.
            until_blocking(
                lambda: any(NO_ROOM_FOR_THE_LOG in c["detail"] for c in checks(bed).values()),
                "a service says so",
                limit_s=BACK_S,
            )
            assert bed.control.ended() == {}
        until_blocking(lambda: bed.client.http.get("/readyz").status_code == 200, "the api is ready", limit_s=BACK_S)
        bed.client.http.post("/v1/nodes/n0/return").raise_for_status()
        assert bed.ready_nodes() == set(bed.nodes)


def fill_log(log: EventLog, node: str, incarnation: str) -> None:
    """Append events until the log takes no more: the pages that the database has already take some.

    Not by requests: the api's projections, which are in the same database, may have no room before the log has none.
    """

    def one() -> dict[str, Any]:
        return {"event_id": str(uuid.uuid4()), "occurred_at": utc_now(), "node": node}

    def is_taken(*events: Event) -> bool:
        try:
            log.append(events)
        except Unavailable as err:
            if NO_ROOM_FOR_THE_LOG not in err.detail:
                raise
            return False
        return True

    until_blocking(
        lambda: not is_taken(NodeCordoned(**one()), NodeReturned(**one(), incarnation=incarnation)),
        "the log takes no more",
        limit_s=BACK_S,
    )
    until_blocking(lambda: not is_taken(NodeReturned(**one(), incarnation=incarnation)), "nor less", limit_s=BACK_S)
