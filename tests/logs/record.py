"""Record golden logs: run a commit of this repository on this machine and keep the event logs of its runs.

    .venv/bin/python -m tests.logs.record                         # all courses, HEAD
    .venv/bin/python -m tests.logs.record --commit ee7cf67 --course every-event

A course is recorded with the code of ``--commit``, by the interpreter and the packages that run this script. The tree,
the interpreter and the packages are reached through ``FOLDER``, so that no traceback in a log shows a path of the
machine; a log that does is refused. ``tests/logs/README.md`` says when a maintainer records and what happens to the
older files. The script talks to the recorded code by the command line and the REST interface alone, and works with any
commit that has the verbs and routes it uses.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import importlib.util
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.logs.kit import Row
from tests.logs.recorded_stack import WAIT_S, running

REPOSITORY = Path(__file__).resolve().parents[2]

FOLDER = Path()
"""All that a recording needs: ``src``, ``python``, ``site``, a run directory for each course. ``main`` sets it."""

SHARED_FOLDER = Path("/tmp")
"""Where runs have their folders, whatever ``TMPDIR`` says: logs show them, and this one is on every machine."""

EVENT_TYPES = frozenset(
    "cluster.configured task.submitted task.stop-requested task.starving task.progressed task.checkpointed "
    "task.stopped task.finished task.failed node.joined error.detected plan.decided state.moved".split()
)
"""What the course ``every-event`` must leave in its log. Later types have courses of their own."""

FAILING_SCRIPT = '''\
"""Raises the same exception at the same step in every process."""

import torch

import unicron


def build(tensor, pipeline):
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


run = unicron.attach(steps=10, micro_batches=8, build=build)
for step in run.steps():
    with step:
        for k in step.micro_batches():
            if step.number == 3:
                raise ValueError("this script never finishes step 3")
            loss = run.model(torch.ones(1, 4)).sum()
            torch.autograd.backward(loss)
            step.commit(k, float(loss.detach()), [k])
        step.reduce()
        run.optimizer.step()
'''


OUTAGE_SCRIPT = '''\
"""Cannot read its data as long as a file exists beside it."""

import pathlib
import time

import torch

import unicron

down = pathlib.Path(__file__).with_name("down")


def build(tensor, pipeline):
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


run = unicron.attach(steps=100_000, micro_batches=8, build=build)
for step in run.steps():
    with step:
        for k in step.micro_batches():
            time.sleep(0.02)
            if down.exists():
                raise OSError(5, "Input/output error", "shard-0001.bin")
            loss = run.model(torch.ones(1, 4)).sum()
            torch.autograd.backward(loss)
            step.commit(k, float(loss.detach()), [k])
        step.reduce()
        run.optimizer.step()
'''


def prepare(commit: str) -> Path:
    """Make the tree of a commit and an interpreter for it below ``FOLDER``; return the interpreter."""
    if FOLDER.exists() and any(FOLDER.iterdir()):
        raise SystemExit(f"{FOLDER} is not empty")
    source = FOLDER / "src"
    source.mkdir(parents=True)
    tree = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, check=True, capture_output=True).stdout
    subprocess.run(["tar", "x", "-C", str(source)], input=tree, check=True)
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise SystemExit("recording needs the packages of the extra `train`")
    (FOLDER / "python").symlink_to(sys.base_prefix)
    (FOLDER / "site").symlink_to(Path(torch.origin).parents[1])
    base = FOLDER / "python" / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run([base, "-m", "venv", "--without-pip", source / ".venv"], check=True)
    (site,) = (source / ".venv" / "lib").glob("python*/site-packages")
    (site / "recorded.pth").write_text(f"{source}\n{FOLDER / 'site'}\n")
    server = shutil.which("nats-server", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if server is None:
        raise SystemExit("recording needs nats-server beside the interpreter or on PATH")
    (source / ".venv" / "bin" / "nats-server").symlink_to(server)
    return source / ".venv" / "bin" / "python"


def demo(python: Path, run_dir: Path) -> None:
    """Record the demo: two tasks, a killed process, an exception, a hang, a lost node."""
    subprocess.run([python, "-P", "-m", "cli.main", "demo", "--run-dir", run_dir], cwd=FOLDER, check=True)


def every_event(python: Path, run_dir: Path) -> None:
    """Record a run in which every type of event occurs, and every response and most kinds of stages."""
    with running(python, run_dir, starvation_s=20, progress_interval_s=1, allow_pausing="false") as cluster:
        script = run_dir / "fails.py"
        script.write_text(FAILING_SCRIPT)

        # A retry, a restart and a reconfiguration of a task that all workers train.
        broken_link = {"UNICRON_FAIL_AT": "1:12:reduce:communication"}
        cluster.submit("steady", steps=100_000, workers={"min": 2, "max": 4}, env=broken_link)
        cluster.reaches("steady", 30)
        cluster.kill_rank("steady", 1)
        cluster.reaches("steady", 20)
        cluster.lose_node("n1")
        cluster.reaches("steady", 20)

        # A task that waits too long: the running one is paused, and comes back when the other has finished. The other
        # must finish before the paused one has waited too long in its turn.
        cluster.submit("impatient", steps=20, workers={"min": 4})
        cluster.ends("impatient", "succeeded")

        # A task that is stopped, and goes on from its checkpoint under the same name. With decider 1 a pause ends a
        # task for good where the end of its processes is logged before its last checkpoint.
        if cluster.task("steady")["state"] != "stopped":
            cluster.reaches("steady", 10)
            cluster.stop("steady")
            cluster.ends("steady", "stopped")
        cluster.submit("steady", steps=cluster.task("steady")["step"] + 30, workers={"min": 1, "max": 2})
        cluster.submit("failing", steps=10, script=str(script), workers={"max": 1}, max_restarts=1)
        cluster.ends("failing", "failed")
        cluster.ends("steady", "succeeded")

        # Divided models, a lost part of a divided optimizer, and a second kind of hardware.
        split = {"tensor": 2, "distributed_optimizer": True}
        cluster.submit("split", steps=100_000, parallel=split, workers={"min": 4})
        cluster.reaches("split", 10)
        cluster.kill_rank("split", 3)
        cluster.reaches("split", 10)
        other = cluster.add_node("m0", "a100-80")
        try:
            cluster.submit("second", steps=100_000, weight=3.0, workers={"min": 1})
            cluster.reaches("second", 10)
            cluster.stop("split")
            cluster.stop("second")
            cluster.ends("split", "stopped")
            cluster.ends("second", "stopped")
        finally:
            other.terminate()
            other.wait(timeout=WAIT_S)


def planned_stop(python: Path, run_dir: Path) -> None:
    """Record a stack that is stopped while a task trains, and started again."""
    with running(python, run_dir) as cluster:
        cluster.submit("steady", steps=100_000, checkpoint={"every": 20})
        cluster.reaches("steady", 50)
    with running(python, run_dir) as cluster:
        cluster.reaches("steady", 20)
        cluster.stop("steady")
        cluster.ends("steady", "stopped")


def unsaved(python: Path, run_dir: Path) -> None:
    """Record a task whose checkpoints fail: it is not stopped before steps may be lost."""
    with running(python, run_dir, progress_interval_s=1) as cluster:
        place = run_dir / "file"
        place.touch()  # no directory can be made there
        checkpoint = {"every": 5, "directory": str(place)}
        cluster.submit("unsaved", steps=100_000, workers={"max": 1}, checkpoint=checkpoint)
        cluster.reaches("unsaved", 10)
        cluster.stop("unsaved")
        cluster.refuses("unsaved")
        cluster.reaches("unsaved", 10)
        cluster.stop("unsaved", lose_steps=True)
        cluster.ends("unsaved", "stopped")


def drained_node(python: Path, run_dir: Path) -> None:
    """Record a node that is cordoned, returned, drained and returned; one task moves, another one saves and waits."""
    with running(python, run_dir) as cluster:
        cluster.submit("moving", steps=100_000, workers={"min": 1, "max": 2}, checkpoint={"every": 20})
        cluster.reaches("moving", 10)
        cluster.ask_node("n1", "cordon", "cordoned")
        cluster.ask_node("n1", "return", "ready")
        cluster.submit("wide", steps=100_000, workers={"min": 2}, parallel={"distributed_optimizer": True})
        cluster.reaches("wide", 10)
        cluster.ask_node("n1", "drain", "drained")
        cluster.ask_node("n1", "return", "ready")
        cluster.reaches("wide", 10)
        for name in ("moving", "wide"):
            cluster.stop(name)
            cluster.ends(name, "stopped")


def adopted_node(python: Path, run_dir: Path) -> None:
    """Record a node whose agent is killed, and one whose agent hands over, while a task trains on both."""
    with running(python, run_dir) as cluster:
        cluster.submit("kept", steps=100_000, workers={"min": 4, "max": 4})
        cluster.reaches("kept", 10)
        cluster.replace_agent("n1", cluster.kill_agent)
        cluster.reaches("kept", 10)
        cluster.replace_agent("n0", cluster.restart_agent)
        cluster.reaches("kept", 10)
        cluster.kill_rank("kept", 1)
        cluster.reaches("kept", 10)
        cluster.stop("kept")
        cluster.ends("kept", "stopped")


def slow_worker(python: Path, run_dir: Path) -> None:
    """Record a worker that is slow, is replaced and comes back, a deal by speed, an anomaly, and a fault on request."""
    with running(python, run_dir) as cluster:
        cluster.submit("held-up", steps=100_000, workers={"min": 1, "max": 3}, batch={"global": 24, "micro": 1})
        cluster.reaches("held-up", 60)  # several reports of progress, whatever the machine's speed
        slow = cluster.worker("held-up", 0)
        cluster.slows("held-up", slow, 2.0)
        cluster.reaches("held-up", 10)
        cluster.slows("held-up", slow, 1.0)  # the plan comes when its trial ends
        # All workers are in use now, so another slow one gets fewer micro-batches.
        cluster.submit("beside", steps=100_000, workers={"min": 1, "max": 1})
        cluster.reaches("beside", 5)
        cluster.slows("held-up", cluster.worker("held-up", 1), 1.5)
        cluster.reaches("held-up", 10)
        cluster.kill_rank("held-up", 2)
        cluster.reaches("held-up", 10)
        place = {"task": "held-up", "generation": cluster.task("held-up")["generation"], "step": 1}
        numbers = {"value": 9.0, "expected": 3.0, "detected_at": cluster.now()}
        cluster.observes(type="anomaly.observed", kind="loss-spike", **place, **numbers)
        cluster.observes(type="fault.injected", fault="slow", task="held-up", rank=1, actor="uid/0")
        for name in ("held-up", "beside"):
            cluster.stop(name)
            cluster.ends(name, "stopped")


def changed_task(python: Path, run_dir: Path) -> None:
    """Record tasks whose weights and limits change while they train, one that is resumed and deleted, and a note."""
    with running(python, run_dir) as cluster:
        cluster.submit("light", steps=100_000, workers={"min": 1})
        cluster.reaches("light", 10)
        cluster.submit("heavy", steps=100_000, weight=3.0, workers={"min": 1, "max": 2})
        cluster.reaches("heavy", 10)
        cluster.change("heavy", weight=100.0, workers={"max": None})
        cluster.reaches("light", 10)
        cluster.reaches("heavy", 10)
        cluster.change("heavy", workers={"max": 1})
        cluster.reaches("heavy", 10)
        cluster.kill_rank("light", 0)
        cluster.reaches("light", 10)
        cluster.says_about_the_last_incident("killed on purpose")
        cluster.stop("heavy")
        cluster.ends("heavy", "stopped")
        cluster.resume("heavy")
        cluster.reaches("heavy", 10)
        for name in ("light", "heavy"):
            cluster.stop(name)
            cluster.ends(name, "stopped")
        cluster.delete("light")


def waiting_task(python: Path, run_dir: Path) -> None:
    """Record a task whose storage is away: it waits, a user resumes it in vain, it waits for its operator, goes on."""
    with running(python, run_dir) as cluster:
        script = run_dir / "outage.py"
        script.write_text(OUTAGE_SCRIPT)
        down = script.with_name("down")
        limits = {"max_restarts": 1, "progress_timeout_s": 12}
        cluster.submit("waiting", steps=100_000, script=str(script), workers={"min": 1, "max": 2}, **limits)
        cluster.reaches("waiting", 10)
        down.touch()
        cluster.is_held_back("waiting")
        cluster.resume("waiting")
        cluster.needs_operator("waiting")
        down.unlink()
        cluster.resume("waiting")
        cluster.reaches("waiting", 10)
        cluster.stop("waiting")
        cluster.ends("waiting", "stopped")


def unwritten_result(python: Path, run_dir: Path) -> None:
    """Record a task whose copies are removed, and that cannot write its result: its workers are lent meanwhile."""
    with running(python, run_dir) as cluster:
        checkpoint = {"every": 0, "memory_every": 4}
        env = {"UNICRON_LEND_AFTER_S": "2"}
        cluster.submit("unwritten", steps=2000, workers={"min": 1, "max": 2}, checkpoint=checkpoint, env=env)
        cluster.reaches("unwritten", 10)
        cluster.loses_copies("unwritten")
        result = run_dir / "tasks" / "unwritten" / "generation-1" / "result"
        result.parent.mkdir(exist_ok=True)
        result.touch()  # no folder can be made there
        cluster.waits("unwritten")
        cluster.submit("beside", steps=40, workers={"min": 4})
        cluster.ends("beside", "succeeded")
        result.unlink()
        cluster.resume("unwritten")
        cluster.ends("unwritten", "succeeded")
        cluster.has_answered("task-ended", 2)


def reported_node(python: Path, run_dir: Path) -> None:
    """Record a node that a monitor has drained and, once it was returned, isolated; another report is held back."""
    with running(python, run_dir) as cluster:
        cluster.submit("reported", steps=100_000, workers={"min": 1, "max": 4})
        cluster.reaches("reported", 10)
        cluster.reports("n1", "fan", "warning", answer="drained")
        cluster.reaches("reported", 10)
        cluster.ask_node("n1", "return", "ready")
        cluster.reaches("reported", 10)
        cluster.reports("n0", "fan", "warning", answer=None)
        cluster.reports("n1", "ib", "error", answer="isolated")
        cluster.has_answered("error", 1)
        cluster.ask_node("n1", "return", "ready")
        cluster.reaches("reported", 10)
        cluster.stop("reported")
        cluster.ends("reported", "stopped")


def measured_node(python: Path, run_dir: Path) -> None:
    """Record nodes that are measured before they join, and a task that trains on them."""
    with running(python, run_dir, preflight=True) as cluster:
        cluster.submit("measured", steps=100_000, workers={"min": 1, "max": 4})
        cluster.reaches("measured", 10)
        cluster.stop("measured")
        cluster.ends("measured", "stopped")


def taken_cause(python: Path, run_dir: Path) -> None:
    """Record a task that waits for more workers than there are: a user takes care of it, until the task is stopped."""
    with running(python, run_dir) as cluster:
        cluster.submit("patient", workers={"min": 8})
        cluster.takes("queue")
        cluster.stop("patient")
        cluster.has_logged("trouble.ended")


COURSES: dict[str, Callable[[Path, Path], None]] = {
    "demo": demo,
    "every-event": every_event,
    "planned-stop": planned_stop,
    "unsaved": unsaved,
    "drained-node": drained_node,
    "adopted-node": adopted_node,
    "slow-worker": slow_worker,
    "changed-task": changed_task,
    "waiting-task": waiting_task,
    "unwritten-result": unwritten_result,
    "reported-node": reported_node,
    "measured-node": measured_node,
    "taken-cause": taken_cause,
}


def rows_of(log: Path) -> list[Row]:
    """Return the rows of a log's table, all columns, in order."""
    with contextlib.closing(sqlite3.connect(f"file:{log}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute("SELECT * FROM log ORDER BY position")]


def check(course: str, rows: list[Row]) -> None:
    """Refuse a log that lacks a type of event, or that shows where and by whom it was recorded."""
    missing = EVENT_TYPES - {row["type"] for row in rows}
    if course == "every-event" and missing:
        raise SystemExit(f"{course}: the log has no {', '.join(sorted(missing))}")
    private = {str(REPOSITORY), str(Path.home()), str(Path(sys.base_prefix).resolve()), socket.gethostname()}
    private |= {f"/{getpass.getuser()}/", str((FOLDER / "site").resolve())}
    if not FOLDER.is_relative_to(SHARED_FOLDER):
        private.add(str(FOLDER))
    for row in rows:
        if found := [text for text in sorted(private) if text in row["data"]]:
            raise SystemExit(f"{course}: position {row['position']} shows {', '.join(found)}")


def decider_of(rows: list[Row]) -> int:
    """Return the decider of the newest plan."""
    plans = [json.loads(row["data"]) for row in rows if row["type"] == "plan.decided"]
    return int(plans[-1]["decider"])


def main() -> None:
    """Record what the command line asks for."""
    global FOLDER
    parser = argparse.ArgumentParser(description="Record golden logs.")
    parser.add_argument("--commit", default="HEAD", help="what to run; default: HEAD")
    parser.add_argument("--course", choices=sorted(COURSES), action="append", help="default: all")
    parser.add_argument("--folder", type=Path, help="for the runs, and kept; default: a temporary one")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent, help="where the files go")
    arguments = parser.parse_args()
    # A short name: the paths of Unix sockets in it have a limit of 107 bytes.
    with tempfile.TemporaryDirectory(prefix="golden-", dir=SHARED_FOLDER) as temporary:
        FOLDER = arguments.folder or Path(temporary)
        python = prepare(arguments.commit)
        for course in arguments.course or sorted(COURSES):
            record(course, python, arguments.to)


def record(course: str, python: Path, to: Path) -> None:
    """Run a course and write its log to a file in ``to``."""
    run_dir = FOLDER / course
    COURSES[course](python, run_dir)
    rows = rows_of(run_dir / "log.db")
    check(course, rows)
    path = to / f"{course}-{decider_of(rows)}.jsonl"
    path.write_text("".join(f"{json.dumps(row, sort_keys=True)}\n" for row in rows))
    print(f"{path}: {len(rows)} events, {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
