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

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

TASK = "train"

STEP_S = 150.0
"""For a run's start, which is imports of all nodes on the same cores, and its first steps."""

SRUN = "srun --ntasks-per-node=1 --cpu-bind=none --no-kill --wait=0 --kill-on-bad-exit=0"
"""As docs/launching.md has it."""

LIMIT_MIN, BEFORE_S = 2, 75
"""The job's time limit, and how long before that the task is stopped: some steps after its start, which takes 15 s."""


class Job:
    """A batch job that runs a script by ``srun unicron run``; it is slow as long as a file exists."""

    def __init__(self, slurm: Slurm, nodes: int, *lines: str, options: tuple[str, ...] = ()) -> None:
        self._slurm, self.folder = slurm, slurm.folder
        (self.folder / "train.py").write_text(SCRIPT)
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

    def hurry(self) -> None:
        """Let the task go on as fast as it can."""
        (self.folder / "slow").unlink()


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """A cluster that is not started yet."""
    folder = tmp_path / "shared"
    folder.mkdir()
    return Slurm(folder, nodes=3)


def run(*options: str, workers: int) -> str:
    """Return the command line of a run."""
    return f"{SRUN} unicron run --workers {workers} --spec rest.yaml {' '.join(options)} -- train.py"


def test_one_srun_on_three_nodes_heals_a_killed_rank_and_a_lost_node(slurm: Slurm) -> None:
    say = Story()
    with slurm:
        job = Job(slurm, 3, run(workers=3), "echo srun: $?", "cat .unicron/allocations/*/end")
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


def test_a_run_stops_before_the_time_limit_and_goes_on(slurm: Slurm) -> None:
    with slurm:
        first, second = (run(f"--stop-before-s={margin_s}", workers=2) for margin_s in (BEFORE_S, 0))
        lines = (first, "echo srun: $?", "rm slow", second, "echo srun: $?")
        job = Job(slurm, 2, *lines, options=(f"--time={LIMIT_MIN}",))
        job.until(r"srun: 75\n")
        stopped = int(job.until(r"train stopped at step (\d+) of 300; .*; saved in ")[1])
        job.until(rf"train goes on from step {stopped}\b")
        job.until(r"srun: 0\n")
        assert step_lines(job.log) == [*range(1, STEPS + 1)]
        assert weights_after(job.log) == pytest.approx(weights_after(), rel=1e-5)
    assert processes_of(slurm.folder) == []


def drained(client: Client) -> list[str]:
    """Return the nodes that were drained."""
    return [node["name"] for node in client.items("/v1/nodes") if node["state"] == "drained"]


def until_ranks_are_on(client: Client, nodes: int) -> None:
    """Wait until the task has ranks on so many nodes."""
    client.until("ranks are everywhere", lambda: len({rank["node"] for rank in client.task(TASK)["ranks"]}) == nodes)
