"""A backup is taken under load and restored: the log verifies with the noted head, and tasks go on from checkpoints."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import make_url

from tests.e2e.by_hand import cli, events, start, stop, until_gone
from tests.e2e.kit import Client, Pace, Record, check_result, processes_of, small_task
from tests.postgres import PostgresServer, find_binaries

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NODES = 2
STEPS = 80


class Place:
    """Where a stack runs: its run directory, and its log."""

    def __init__(self, run_dir: Path, log_url: str) -> None:
        self.run_dir, self.log_url = run_dir, log_url


@pytest.fixture
def log_urls(tmp_path: Path) -> Iterator[list[str]]:
    """URLs of two empty databases: on PostgreSQL where it is installed, since the other test here has SQLite."""
    if find_binaries() is None:
        yield [f"sqlite:///{tmp_path / name / 'log.db'}" for name in ("here", "there")]
        return
    with PostgresServer() as server:
        url = make_url(server.url)
        dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
        names = [f"log_{uuid.uuid4().hex}" for _ in range(2)]
        with psycopg.connect(dsn, autocommit=True) as connection:
            for name in names:
                connection.execute(f"CREATE DATABASE {name}".encode())
        yield [url.set(database=name).render_as_string(hide_password=False) for name in names]


@pytest.fixture
def run_dirs(tmp_path: Path) -> Iterator[list[Path]]:
    """Two run directories, of which no process is left."""
    found = [tmp_path / "here" / "run", tmp_path / "there" / "run"]
    yield found
    for pid in [pid for path in found for pid in processes_of(path)]:
        os.kill(pid, signal.SIGKILL)


@contextmanager
def load(url: str, data: Path) -> Iterator[None]:
    """Have users submit and stop tasks for which there is no room, as fast as the server takes it."""
    ended = threading.Event()
    failures: list[str] = []

    def use(user: int) -> None:
        with Client(url) as client:
            for number in itertools.count():
                if ended.is_set():
                    return
                name = f"load-{user}-{number}"
                spec = small_task(name, data, workers={"min": 64, "max": 64})
                answers = [client.http.post("/v1/tasks", json=spec), client.http.post(f"/v1/tasks/{name}/stop")]
                failures.extend(answer.text for answer in answers if answer.is_error)

    users = [threading.Thread(target=use, args=(user,)) for user in range(2)]
    for user in users:
        user.start()
    try:
        yield
    finally:
        ended.set()
        for user in users:
            user.join()
    assert failures == []


def checkpoint_step(client: Client, name: str) -> int:
    """Return the step of the newest checkpoint that the log has of a task; 0 if it has none."""
    task = client.task(name)
    return int(task["checkpoint"].rpartition("step-")[2]) if task["checkpoint"] else 0


def head_position(client: Client) -> int:
    """Return the position of the log's last event."""
    return int(client.http.get("/v1/log/head").json()["position"])


def until_past(client: Client, position: int) -> None:
    """Wait until the log has events behind a position."""
    client.until(f"the log goes on behind position {position}", lambda: head_position(client) > position)


def back_up_under_load(client: Client, url: str, log_url: str, folder: Path, data: Path) -> Record:
    """Take two backups, the second of what has been added, while the log grows; return what the second one prints."""
    with load(url, data):
        done: Record = {"position": 0}
        for _ in range(2):
            until_past(client, head_position(client) + 20)
            before, done = done, json.loads(cli("backup", str(folder), "--log", log_url, "-o", "json"))
            assert done["segment"]["first_position"] == before["position"] + 1
            until_past(client, done["position"])
    return done


def train_and_lose(place: Place, backup: Path, spec: Record, environment: dict[str, str]) -> str:
    """Train under load, take a backup, train on to further checkpoints, and lose everything at once.

    Returns:
        The head that was noted.
    """
    process, url = start(place.run_dir, nodes=NODES, workers=1, UNICRON_LOG_URL=place.log_url, **environment)
    try:
        with Client(url) as client:
            client.submit(spec)
            client.until("a first checkpoint", lambda: checkpoint_step(client, "main") > 0)
            done = back_up_under_load(client, url, place.log_url, backup, Path(spec["data"]))
            saved = checkpoint_step(client, "main")
            client.until("a later checkpoint", lambda: checkpoint_step(client, "main") > saved)
            assert client.task("main")["state"] == "running"
    finally:
        process.kill()
        process.wait()
    until_gone(place.run_dir)
    return f"{done['position']}:{done['head']}"


@contextmanager
def going_on(
    place: Place, backup: Path, head: str, pace: Pace, environment: dict[str, str], saved: set[str]
) -> Iterator[Client]:
    """Restore, verify, start everything there, and let the task go on to its end from state in one of these places."""
    assert json.loads(cli("restore", str(backup), "--log", place.log_url, "-o", "json"))["head"] == head.split(":")[1]
    cli("replay", place.log_url, "--verify", "--expect-head", head)
    cli("restore", str(backup), "--log", place.log_url, code=4)
    process, url = start(place.run_dir, nodes=NODES, workers=1, UNICRON_LOG_URL=place.log_url, **environment)
    try:
        pace.end()
        with Client(url) as client:
            client.until_state("main", "succeeded")
            moved = [record["event"] for record in events(url) if record["type"] == "state.moved"]
            sources = {kind for event in moved if event["task"] == "main" for kind in event["sources"].values()}
            # Its start before the backup apart, the state is what it had: in a checkpoint, or still in a node's memory.
            assert sources & saved
            yield client
    finally:
        stop(process, place.run_dir)
    cli("replay", place.log_url, "--verify", "--expect-head", head)


def settings_of(tmp_path: Path) -> dict[str, str]:
    """Return the settings of both stacks: checkpoints lie outside, and services write snapshots of their state."""
    return {
        "UNICRON_CHECKPOINT_URL": f"file://{tmp_path / 'checkpoints'}",
        "UNICRON_REQUESTS_PER_S": "0",
        "UNICRON_STATE_SNAPSHOT_EVENTS": "20",
    }


def test_tasks_go_on_elsewhere_from_a_backup_taken_under_load(
    run_dirs: list[Path], log_urls: list[str], corpus: Path, tmp_path: Path
) -> None:
    """Nothing is left of the first place but backup and checkpoints."""
    pace, environment = Pace(tmp_path, 0.05), settings_of(tmp_path)
    spec = small_task("main", corpus, steps=STEPS, workers={"min": 2, "max": 2}, checkpoint={"every": 5})
    here, there = (Place(*each) for each in zip(run_dirs, log_urls, strict=True))
    head = train_and_lose(here, tmp_path / "backup", pace.of(spec), environment)
    here.run_dir.rename(tmp_path / "lost")
    with going_on(there, tmp_path / "backup", head, pace, environment, {"checkpoint"}) as client:
        check_result(client, "main", spec, tmp_path)


def test_tasks_go_on_where_stream_and_snapshots_are_ahead_of_the_restored_log(
    run_dirs: list[Path], corpus: Path, tmp_path: Path
) -> None:
    """Only the database was lost: what NATS and the run directory have of later events counts for nothing."""
    pace, environment = Pace(tmp_path, 0.05), settings_of(tmp_path)
    spec = small_task("main", corpus, steps=STEPS, workers={"min": 2, "max": 2}, checkpoint={"every": 5})
    database = run_dirs[0] / "log.db"
    place = Place(run_dirs[0], f"sqlite:///{database}")
    head = train_and_lose(place, tmp_path / "backup", pace.of(spec), environment)
    assert list((place.run_dir / "state-snapshots").iterdir())
    for path in list(place.run_dir.glob("log.db*")):
        path.unlink()
    with going_on(place, tmp_path / "backup", head, pace, environment, {"memory", "checkpoint"}) as client:
        check_result(client, "main", spec, tmp_path)
    assert "contradicts the log" in "".join(path.read_text() for path in place.run_dir.rglob("*.log"))
