"""deploy/slurm/unicron.sbatch in a Slurm cluster: faults are healed, and a requeue loses no step."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.cluster.control import Control
from tests.cluster.training import BATCH_S, FIRST_STEPS, MODEL
from tests.condition import until_blocking
from tests.e2e.kit import Client, Pace, Record, at, check_result, make_corpus, processes_of, rank, small_task
from tests.slurm.cluster import LOGIN, Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]

NODES = 4
"""Three for the job, and one more for the job once it was requeued."""

TASK = "walk"

STEPS = 600
"""More than the task does at its pace until it was requeued: a step of two ranks takes 0.8 s at least."""

LIMIT_MIN, WARNING_S = 4, 60
"""The job's time limit, and how long before it Slurm is to send the signal: it does 150 to 180 s after the start. The
faults before that take half a minute, and on a busy machine three times as long."""

READY_S = 180.0
"""For agents and services to start: seconds of imports, which all machines do on the same cores."""

END_S = 120.0
"""For the end of the task at full speed, and of the job."""


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """A cluster that is not started yet."""
    folder = tmp_path / "shared"
    folder.mkdir()
    return Slurm(folder, nodes=NODES)


def test_a_job_heals_and_goes_on_after_its_requeue(slurm: Slurm, tmp_path: Path) -> None:
    """A rank is killed, a node is lost, the time limit comes near, the job goes on on other nodes.

    The job's first node is another one then. The task has no checkpoint but that of the drain, and in the end the
    parameters of a run without failures, bit for bit.
    """
    run_dir = slurm.folder / "run"
    corpus = make_corpus(slurm.folder)
    plain = small_task(TASK, corpus, model=MODEL, steps=STEPS, exact=True, checkpoint={"every": 0})
    pace = Pace(slurm.folder, BATCH_S)
    (slurm.folder / "walk.yaml").write_text(yaml.safe_dump(pace.of(plain)))
    say = Story()
    with slurm:
        say("a Slurm cluster of four nodes")
        options = ("--nodes=2-3", f"--time={LIMIT_MIN}", f"--signal=B:USR1@{WARNING_S}")
        job = slurm.submit(run_dir, *options, settings={"UNICRON_WORKERS_PER_NODE": "1"})
        slurm.until_job(job, "RUNNING")
        nodes = slurm.hosts(job)
        assert len(nodes) == 3
        with slurm.client(nodes[0]) as client:
            until_ready(client, set(nodes))
            say(f"job {job} runs on {' '.join(nodes)}: all nodes are ready")
            # As docs/deploy/slurm.md has it.
            first = shlex.split(f"srun --jobid={job} --overlap --nodes=1 --ntasks=1 --nodelist={nodes[0]}")
            assert slurm.run(*first, "unicron", "nodes").count("ready") == len(nodes)
            assert TASK in slurm.run(*first, "unicron", "submit", str(slurm.folder / "walk.yaml"))
            before = until_trains(client, set(nodes))

            planner = process_of(run_dir, "services.planner.main")
            os.kill(planner, signal.SIGKILL)
            client.until(
                "the planner is started again", lambda: process_of(run_dir, "services.planner.main") not in (0, planner)
            )
            say("the planner was killed, and is started again")

            victim = rank(before, 1)
            assert str(victim["pid"]) in slurm.run(*first, "unicron", "show", TASK)
            slurm.run(*first[:-1], f"--nodelist={victim['node']}", "kill", "-KILL", str(victim["pid"]))
            healed = client.until_restored("process-exit")
            assert (healed["severity"], healed["worker"], healed["steps_recomputed"]) == ("SEV2", victim["worker"], 0)
            assert "process-exit" in slurm.run(*first, "unicron", "incidents")
            say(f"{victim['worker']} was killed: {duration(healed)}, 0 steps recomputed")

            lost = nodes[-1]
            slurm.nodes[lost].power_off()
            slurm.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=off")
            healed = client.until_restored("node-lost")
            assert (healed["severity"], healed["node"], healed["steps_recomputed"]) == ("SEV1", lost, 0)
            say(f"{lost} has no power: {duration(healed)}, 0 steps recomputed")
            assert (slurm.job(job)["JobState"], slurm.hosts(job)) == ("RUNNING", nodes[:-1])
            client.until_step(TASK, client.task(TASK)["step"] + 2)

            slurm.run("scontrol", "update", f"nodename={nodes[0]}", "state=drain", "reason=kernel")
            known = len(client.items("/v1/events"))
            incidents = len(client.items("/v1/incidents"))
            reached = last_step(client)
        say(f"step {reached}; {nodes[0]} takes no new job, and Slurm's signal has been sent")
        slurm.until_job(job, "PENDING", Restarts="1")
        say("the job waits to be started again")
        assert processes_of(run_dir) == []
        slurm.until_job(job, "RUNNING", Restarts="1")
        others = slurm.hosts(job)
        assert not {nodes[0], lost} & set(others)
        with slurm.client(others[0]) as client:
            until_ready(client, set(others))
            say(f"job {job} runs on {' '.join(others)}: all nodes are ready")
            after = until_trains(client, set(others))
            moved = moves(client, known)
            assert {event["steps_recomputed"] for event in moved} == {0}
            assert [event["step"] for event in moved if event["phase"] == "ended"] == [reached]
            assert min(event["step"] for event in moved if event["phase"] == "restored") == reached + 1
            assert len(client.items("/v1/incidents")) == incidents
            say(f"step {after['step']}")
            pace.end()
            client.until_state(TASK, "succeeded", END_S)
            check_result(client, TASK, plain, tmp_path)
            say("the task has the parameters of a run without failures")
        slurm.run("scancel", "--batch", "--signal=TERM", job)
        slurm.until_job(job, "COMPLETED")
        assert processes_of(run_dir) == []
        assert slurm.job(job)["ExitCode"] == "0:0"
        say("the job has ended")
    assert processes_of(slurm.folder) == []


def test_a_job_joins_a_control_plane_elsewhere(slurm: Slurm, tmp_path: Path) -> None:
    """The job brings agents only; when it is asked to end, the task's state is saved and the nodes leave."""
    run_dir = slurm.folder / "run"
    spec = small_task(TASK, make_corpus(slurm.folder), model=MODEL, steps=STEPS, checkpoint={"every": 0})
    with slurm:
        checkpoints = {"UNICRON_CHECKPOINT_URL": f"file://{slurm.folder}/checkpoints"}
        control = Control(slurm.machines[LOGIN], checkpoints, slurm.nodes)
        control.start_nats()
        control.start()
        where = {"UNICRON_NATS_URL": control.nats_url, "UNICRON_NATS_KEYS": str(control.keys.path)}
        job = slurm.submit(run_dir, "--nodes=2", settings={"UNICRON_WORKERS_PER_NODE": "1", **where})
        slurm.until_job(job, "RUNNING")
        nodes = set(slurm.hosts(job))
        with Client("http://localhost", transport=control.transport()) as client:
            until_ready(client, nodes)
            client.submit(Pace(slurm.folder, BATCH_S).of(spec))
            until_trains(client, nodes)
            slurm.run("scancel", "--batch", "--signal=TERM", job)
            slurm.until_job(job, "COMPLETED")
            assert processes_of(run_dir) == []
            assert {node["name"]: node["state"] for node in client.items("/v1/nodes")} == dict.fromkeys(nodes, "left")
            task = client.task(TASK)
            assert task["state"] == "queued"
            moved = moves(client, 0)
            assert {event["steps_recomputed"] for event in moved} == {0}
            assert [event["step"] for event in moved if event["phase"] == "ended"] == [task["step"]]
            assert client.items("/v1/incidents") == []


def test_a_job_that_has_lost_its_first_node_is_requeued(slurm: Slurm) -> None:
    """Another node sees to that. A second job with the same run directory ends at once."""
    with slurm:
        job = slurm.submit(slurm.folder / "run", "--nodes=2", settings={"UNICRON_WORKERS_PER_NODE": "1"})
        slurm.until_job(job, "RUNNING")
        first, *others = slurm.hosts(job)
        with slurm.client(first) as client:
            until_ready(client, {first, *others})
        second = slurm.submit(slurm.folder / "run", "--nodes=2")
        slurm.until_job(second, "FAILED")
        assert "another job uses" in (slurm.folder / "job.log").read_text()
        slurm.nodes[first].power_off()
        slurm.run("scontrol", "update", f"nodename={first}", "state=down", "reason=off")
        assert slurm.job(job)["JobState"] == "RUNNING"
        slurm.until_job(job, "PENDING", Restarts="1")


class Story:
    """Prints what has been seen, and when."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"\n{time.monotonic() - self._began:6.1f} s  {text}", end="", flush=True)


def duration(incident: Record) -> str:
    """Return in words how long an incident took."""
    return f"healed in {at(incident, 'restored_at') - at(incident, 'occurred_at'):.1f} s"


def process_of(run_dir: Path, module: str) -> int:
    """Return the pid of a job's process that runs a module; 0 if there is none."""
    for pid in processes_of(run_dir):
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).cmdline()[-1:] == [module]:
                return pid
    return 0


def answered(ask: Callable[[], Record | bool]) -> Record | bool:
    """Return an answer of an API that may be about to start or to end: False while there is none."""
    try:
        return ask()
    except httpx.HTTPError:
        return False


def until_ready(client: Client, nodes: set[str]) -> None:
    """Wait until exactly these nodes are ready."""

    def ready() -> bool:
        return {node["name"] for node in client.items("/v1/nodes") if node["state"] == "ready"} == nodes

    until_blocking(lambda: answered(ready), f"{sorted(nodes)} are ready", limit_s=READY_S)


def until_trains(client: Client, nodes: set[str]) -> Record:
    """Wait until the task has done some steps, and trains on these nodes; return it."""
    client.until_step(TASK, FIRST_STEPS, READY_S)

    def trains() -> Record | None:
        task = client.task(TASK)
        return task if {rank["node"] for rank in task["ranks"]} == nodes and task["state"] == "running" else None

    task: Record = client.until(f"the task trains on {sorted(nodes)}", trains, READY_S)
    return task


def moves(client: Client, known: int) -> list[Record]:
    """Return what the plans have done, from the event ``known`` on."""
    events = [record["event"] for record in client.items("/v1/events")[known:]]
    return [event for event in events if event["type"] == "state.moved"]


def last_step(client: Client) -> int:
    """Ask for the task's step until the control plane has ended; return the last one."""
    reached = 0
    while task := answered(lambda: client.task(TASK)):
        reached = task["step"] if isinstance(task, dict) else reached
        time.sleep(0.1)
    return reached
