"""``srun unicron run`` on several nodes of a job: one healed task, without a cluster-wide service."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.condition import until_blocking
from tests.e2e.kit import Client, processes_of, rank
from tests.e2e.several_nodes import REST, SCRIPT, STEPS, step_lines, weights_after
from tests.slurm.cluster import Slurm
from tests.slurm.test_job import Story, duration

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]

TASK = "train"

STEP_S = 300.0
"""For a run's start, which is imports of all nodes on the same cores, and its first steps."""

SRUN = "srun --ntasks-per-node=1 --cpu-bind=none --no-kill --wait=0 --kill-on-bad-exit=0"
"""As docs/launching.md has it."""

EVERY = 10
"""Steps between checkpoints of a task that is to lose all at once."""

MORE_TIME = ("scontrol", "update", 'jobid="$SLURM_JOB_ID"', "timelimit=60")
"""So that the job comes to its time limit once."""

LIMIT_MIN, BEFORE_S = 4, 75
"""The job's time limit, and how long before that the task is stopped: some steps after its start, which takes 15 s, and
on a busy machine two minutes."""


class Job:
    """A batch job that runs a script by ``srun unicron run``; it is slow as long as a file exists."""

    def __init__(
        self, slurm: Slurm, nodes: int | str, *lines: str, options: tuple[str, ...] = (), text: str = SCRIPT
    ) -> None:
        self._slurm, self.folder = slurm, slurm.folder
        (self.folder / "train.py").write_text(text)
        (self.folder / "rest.yaml").write_text(yaml.safe_dump(REST))
        (self.folder / "slow").touch()
        script = self.folder / "job.sh"
        script.write_text("\n".join(["#!/bin/bash", f"cd {shlex.quote(str(self.folder))}", *lines, ""]))
        given = ("--no-kill", f"--nodes={nodes}", f"--output={self.folder / 'job.log'}", *options)
        self.number = slurm.run("sbatch", "--parsable", *given, str(script)).strip()

    @property
    def log(self) -> str:
        """What the job has printed so far."""
        path = self.folder / "job.log"
        return path.read_text() if path.exists() else ""

    def until(self, text: str) -> re.Match[str]:
        """Wait until the job has printed something; return it."""
        until_blocking(lambda: re.search(text, self.log), text, limit_s=STEP_S, seen=lambda: self.log)
        found = re.search(text, self.log)
        assert found is not None
        return found

    def until_goes_on(self, restarts: int) -> int:
        """Wait until the job was requeued so often and its task trains again; return the step from which it goes on."""
        self._slurm.until_job(self.number, "RUNNING", Restarts=str(restarts))
        goes_on = re.compile(r"train goes on from step (\d+);")
        until_blocking(lambda: len(goes_on.findall(self.log)) == restarts, "it goes on", limit_s=STEP_S)
        step = int(goes_on.findall(self.log)[-1])
        self.until(rf"\| step {step + 2} ")
        return step

    def hurry(self) -> None:
        """Let the task go on as fast as it can."""
        (self.folder / "slow").unlink()


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """A cluster that is not started yet."""
    folder = tmp_path / "shared"
    folder.mkdir()
    return Slurm(folder, nodes=3)


def run(*options: str) -> str:
    """Return the command line of a run, with a worker on each node."""
    return f"{SRUN} unicron run --spec rest.yaml {' '.join(options)} -- train.py"


def test_one_srun_on_three_nodes_heals_a_killed_rank_and_a_lost_node(slurm: Slurm) -> None:
    say = Story()
    with slurm:
        job = Job(slurm, 3, run(), "echo srun: $?", "cat .unicron/allocations/*/end")
        port = int(job.until(r"live page: http://127\.0\.0\.1:(\d+)/")[1])
        job.until(r"\| step 5 ")
        first, middle, last = slurm.hosts(job.number)
        say(f"job {job.number} trains")
        with slurm.client(first, port) as client:
            until_ranks_are_on(client, 3)
            victim = rank(client.task(TASK), 1)
            on = ("srun", f"--jobid={job.number}", "--overlap", "--nodes=1", "--ntasks=1")
            slurm.run(*on, f"--nodelist={victim['node']}", "kill", "-KILL", str(victim["pid"]))
            healed = client.until_restored("process-exit")
            assert (healed["worker"], healed["steps_recomputed"]) == (victim["worker"], 0)
            say(f"{victim['worker']} was killed: {duration(healed)}")
            slurm.run("scontrol", "update", f"nodename={middle}", "state=drain", "reason=ECC errors")
            watch = ("unicron", "watch", "slurm", "--once", "--server", f"http://127.0.0.1:{port}")
            slurm.run(*on, f"--nodelist={first}", *watch)
            client.until(f"{middle} is drained", lambda: drained(client) == [middle])
            say(f"{middle} takes no new job of Slurm's, and is drained")
            slurm.nodes[last].power_off()
            slurm.run("scontrol", "update", f"nodename={last}", "state=down", "reason=off")
            healed = client.until_restored("node-lost")
            assert (healed["node"], healed["steps_recomputed"]) == (last, 0)
            say(f"{last} has no power: {duration(healed)}")
        job.hurry()
        job.until(r"srun: \d+\n\d+")
        say(job.log[-600:])
        assert "train succeeded at step 300 of 300; 2 faults healed" in job.log
        assert step_lines(job.log) == [*range(1, STEPS + 1)]
        assert weights_after(job.log) == pytest.approx(weights_after(), rel=1e-5)
        assert job.log.endswith("\n0")
    assert processes_of(slurm.folder) == []


def test_a_job_that_is_requeued_goes_on_and_reaches_the_end(slurm: Slurm) -> None:
    """At its time limit, as docs/launching.md has it; by ``scontrol requeue``; and since another job preempts it."""
    say = Story()
    with slurm:
        requeue = f'[[ $code != 75 ]] || {{ {" ".join(MORE_TIME)}; scontrol requeue "$SLURM_JOB_ID"; }}'
        lines = (run(f"--stop-before-s={BEFORE_S}"), "code=$?", "echo srun: $code", requeue, "exit $code")
        options = (f"--time={LIMIT_MIN}", "--requeue", "--open-mode=append")
        text = SCRIPT.replace("time.sleep(0.1)", "time.sleep(0.5)")  # so that it does not reach its end before
        job = Job(slurm, 2, *lines, options=options, text=text)
        job.until(r"srun: 75\n")
        stopped = int(job.until(r"train stopped at step (\d+) of 300; .*; saved in ")[1])
        assert job.until_goes_on(restarts=1) == stopped
        say(f"job {job.number} has stopped before its time limit at step {stopped}, and goes on")
        # From now on srun ends as Slurm asks it to, and what ranks print until they have stopped is lost with it.
        slurm.run("scontrol", "requeue", job.number)
        slurm.until_job(job.number, "PENDING", Restarts="2")
        say(f"it was requeued, and goes on from step {job.until_goes_on(restarts=2)}")
        whole = ("--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true")
        urgent = slurm.run("sbatch", "--parsable", *whole).strip()
        slurm.until_job(job.number, "PENDING", Restarts="3")
        say(f"job {urgent} has preempted it, and it goes on from step {job.until_goes_on(restarts=3)}")
        job.hurry()
        job.until(r"srun: 0\n")
        say(job.log[-600:])
        done = step_lines(job.log)
        assert (done, done[0], done[-1]) == (sorted(set(done)), 1, STEPS), "no step was computed again"
        assert weights_after(job.log) == pytest.approx(weights_after(), rel=1e-5)
        slurm.until_job(job.number, "COMPLETED")
    assert processes_of(slurm.folder) == []


def test_a_job_that_loses_its_first_node_is_requeued_and_goes_on_without_it(slurm: Slurm) -> None:
    """The control plane was there, and the batch script: another node has the job requeued."""
    say = Story()
    with slurm:
        text = SCRIPT.replace("checkpoint_every=1000", f"checkpoint_every={EVERY}")
        job = Job(slurm, "2-3", run(), "echo srun: $?", options=("--requeue", "--open-mode=append"), text=text)
        job.until(rf"\| step {EVERY + 2} ")
        first, *others = slurm.hosts(job.number)
        assert len(others) == 2
        slurm.nodes[first].power_off()
        slurm.run("scontrol", "update", f"nodename={first}", "state=down", "reason=off")
        say(f"job {job.number} has lost {first}, its first node")
        assert slurm.job(job.number)["JobState"] == "RUNNING", "Slurm does not requeue it by itself"
        slurm.until_job(job.number, "PENDING", Restarts="1")
        say("another node has it requeued")
        slurm.until_job(job.number, "RUNNING", Restarts="1")
        assert slurm.hosts(job.number) == others
        assert f"{first}, where the batch script was, is down, and job {job.number} is requeued" in job.log
        job.hurry()
        job.until(r"srun: 0\n")
        say(job.log[-900:])
        # What ranks print before the run follows them again is in their own files alone.
        outputs = [path.read_text() for path in (slurm.folder / ".unicron/tasks" / TASK / "output").glob("*-0.log")]
        went_on = [
            int(step) for text in outputs for step in re.findall(r"from a checkpoint: (?s:.*?)\nstep (\d+) ", text)
        ]
        assert went_on
        # The line about the generation comes with its first step, whose own line may stand before it.
        assert (went_on[0] - 1) % EVERY <= 1, "behind its newest checkpoint"
        assert step_lines(job.log)[-1] == STEPS
        assert weights_after(job.log) == pytest.approx(weights_after(), rel=1e-5)
    assert processes_of(slurm.folder) == []


def drained(client: Client) -> list[str]:
    """Return the nodes that were drained."""
    return [node["name"] for node in client.items("/v1/nodes") if node["state"] == "drained"]


def until_ranks_are_on(client: Client, nodes: int) -> None:
    """Wait until the task has ranks on so many nodes."""
    client.until("ranks are everywhere", lambda: len({rank["node"] for rank in client.task(TASK)["ranks"]}) == nodes)
