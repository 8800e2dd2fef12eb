"""``srun unicron run`` on several nodes: what is read from Slurm, the folder where nodes meet, and the time limit.

``tests/e2e/test_several_nodes.py`` has a course of it, ``tests/slurm/test_srun.py`` those on Slurm.
"""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
import typer

from cli.launch import other_node
from cli.launch.allocation import Allocation, allocation_of, bound, lacks_commands
from cli.launch.interrupts import Interrupts
from cli.launch.place import division, place_of
from cli.launch.requeue import requeue
from cli.launch.time_limit import interrupt_before_limit, left_s, seconds_of
from cli.stack import meeting as meetings
from cli.stack.devices import Device, Division
from cli.stack.meeting import Meeting, Offer
from services.agent.machine.hardware import Devices
from shared.bus.identities import node_identity
from shared.errors import Conflict, InvalidInput, Unavailable, UnicronError
from tests.cli.conftest import NOWHERE
from tests.cli.test_run_check import call
from tests.condition import until

# ---- what Slurm says

STEP = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "1", "SLURMD_NODENAME": "GPU_07.example.org",
}  # fmt: skip
"""The environment of one of three processes that srun has started."""


def test_the_processes_of_one_srun_know_one_another() -> None:
    assert allocation_of(STEP) == Allocation("17.2-0", "gpu-07", 3, is_first=False)
    assert allocation_of({**STEP, "SLURM_PROCID": "0"}) == Allocation("17.2-0", "gpu-07", 3, is_first=True)
    # A job that was requeued has its number, and counts its steps anew.
    assert allocation_of({**STEP, "SLURM_RESTART_COUNT": "1"}) == Allocation("17.2-1", "gpu-07", 3, is_first=False)


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "3", "SLURM_PROCID": "0"},
                                         {**STEP, "SLURM_STEP_NUM_TASKS": "1"}])  # fmt: skip
def test_one_process_alone_needs_no_others(environment: dict[str, str]) -> None:
    assert allocation_of(environment) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SLURM_STEP_NUM_TASKS": "24"}, "--ntasks-per-node 1 (given: 24 on 3 nodes)"),
        ({"SLURM_PROCID": "first"}, "SLURM_PROCID must be a whole number"),
        ({"SLURMD_NODENAME": ""}, "SLURMD_NODENAME is not set"),
    ],
)
def test_what_srun_does_not_say_so_is_refused(changes: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        allocation_of(STEP | changes)
    assert said in refused.value.detail
    assert refused.value.extra["errors"][0]["field"] == next(iter(changes))


def test_its_nodes_are_the_cluster_and_have_as_many_workers_each(tmp_path: Path) -> None:
    found = allocation_of(STEP)
    place = place_of(None, tmp_path, found)
    assert place[:2] == (None, tmp_path)
    assert "3 nodes of this srun" in place.said
    assert division(Devices(), Device.CPU, 6, 3) == Division(1, 2)
    with pytest.raises(InvalidInput, match="--workers: 7 must be a multiple of 3"):
        division(Devices(), Device.CPU, 7, 3)


def test_processes_of_several_nodes_do_not_all_submit_to_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    done = call("--server", NOWHERE, "--", "train.py")
    assert (done.code, "srun --ntasks 1" in done.err) == (2, True)
    done = call("--check", "--", "train.py")
    assert (done.code, done.out) == (0, ""), "the first process says it"


def test_few_cpus_for_all_ranks_of_a_node_are_said() -> None:
    there = STEP | {"SLURM_CPUS_ON_NODE": "64"}
    assert "2 of the job's 64 CPUs: --cpu-bind=none" in bound(there, 2)
    assert bound(there, 64) == bound({"SLURM_CPUS_ON_NODE": "64"}, 2) == bound(STEP, 2) == ""


def test_commands_of_slurm_that_a_container_lacks_are_said() -> None:
    assert lacks_commands([]) == ""
    found = lacks_commands(["squeue", "scontrol"])
    assert "squeue, scontrol not in PATH" in found
    assert "time limit that is changed and the loss of the first node" in found


# ---- where they meet


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at the folder follow at once."""
    monkeypatch.setattr(meetings, "POLL_S", 0.001)
    monkeypatch.setattr(other_node, "LOOK_S", 0.001)


def both(folder: Path) -> tuple[Meeting, Meeting]:
    """Return the meeting of a first node and of another one."""
    return Meeting(folder, "17.2-0", "n0", 2), Meeting(folder, "17.2-0", "n1", 2)


@pytest.mark.usefixtures("short")
async def test_nodes_meet_and_end_with_the_first(tmp_path: Path) -> None:
    first, other = both(tmp_path)
    joining = asyncio.create_task(other.join())
    with first.opened():
        assert stat.S_IMODE(first.folder.stat().st_mode) == 0o700
        await joining
        assert await first.others() == ["n1"]
        offered = asyncio.create_task(other.offered())
        first.offer(Offer(workers_per_node=8, on_devices=True))
        first.keys.make(more=[node_identity("n1")])
        assert other.servers() == [], "the bus does not listen yet"
        first.keys.make(["tls://198.51.100.1:4222"])
        assert await offered == Offer(workers_per_node=8, on_devices=True)
        assert other.servers() == ["tls://198.51.100.1:4222"]
        assert stat.S_IMODE(other.credential.stat().st_mode) == 0o600
        assert not other.is_over
        first.ask_to_leave()
        assert other.is_over
        assert other.status is None
    assert await other.ended() == 0
    assert not first.keys.path.exists()
    with pytest.raises(Conflict, match="is of another run"), first.opened():
        pass


@pytest.mark.parametrize(("ends_with", "status"), [(typer.Exit(75), 75), (Unavailable("x"), 5), (KeyError("x"), 1)])
def test_all_have_the_exit_status_of_the_first(ends_with: Exception, status: int, tmp_path: Path) -> None:
    first, other = both(tmp_path)
    with pytest.raises(type(ends_with)), first.opened():
        raise ends_with
    assert other.status == status


@pytest.mark.usefixtures("short")
async def test_a_folder_that_is_not_shared_is_said_on_both_sides(tmp_path: Path) -> None:
    (first, _), (_, other) = both(tmp_path / "here"), both(tmp_path / "there")
    with first.opened():
        with pytest.raises(Unavailable, match=r"1 of 2 nodes \(n0\) have found .*--run-dir must name a folder that"):
            await first.others(0.01)
        with pytest.raises(Unavailable, match=r"n1 finds no .*there.*--run-dir must name a folder that all nodes"):
            await other.join(0.01)


@pytest.mark.usefixtures("short")
async def test_a_folder_that_others_may_enter_is_not_trusted(tmp_path: Path) -> None:
    _, other = both(tmp_path)
    other.folder.mkdir(parents=True)
    other.folder.chmod(0o755)
    with pytest.raises(Unavailable, match="this user alone"):
        await other.join(0.01)


@pytest.mark.usefixtures("short")
async def test_who_does_not_take_part_says_why_and_nobody_waits_for_a_first_that_has_ended(tmp_path: Path) -> None:
    first, other = both(tmp_path)
    with first.opened():
        await other.join()
        other.refuse("it has no device")
        with pytest.raises(Unavailable, match="n1: it has no device"):
            await first.others()
    assert await other.offered() is None
    assert await other.ended() == 0


@pytest.mark.usefixtures("short")
async def test_an_agent_does_not_outlive_the_first_process(tmp_path: Path) -> None:
    first, other = both(tmp_path)
    with first.opened():
        beating = asyncio.create_task(first.keep_beating())
        failed: asyncio.Future[UnicronError] = asyncio.get_running_loop().create_future()
        await until(lambda: bool(other.beat))
        beating.cancel()
        assert not await other_node._until_over(other, failed)
        failed.set_result(Unavailable("n1 ended 6 times in a minute"))
        with pytest.raises(Unavailable, match="6 times"):
            await other_node._until_over(other, failed)


# ---- the first node is lost

JOB = "JobId=17 JobName=a job BatchFlag=1 Requeue=1 Restarts=0 NodeList=n[1-2] BatchHost=n0 StdErr={folder}/job.log"

UP, NOT_HEARD, DOWN = (f"NodeName=n0 Arch=x86_64 State={state} ThreadsPerCore=1" for state in
                       ("MIXED+DRAIN", "MIXED*", "DOWN*"))  # fmt: skip


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for scontrol: says what files say, and notes what is requeued; nobody waits."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "scontrol"
    program.write_text(f'#!/bin/sh\ncase "$1" in requeue) echo $* >>{tmp_path}/done;; *) cat {tmp_path}/$2;; esac\n')
    program.chmod(0o755)
    cancel = tmp_path / "bin" / "scancel"
    cancel.write_text(f"#!/bin/sh\necho cancel $* >>{tmp_path}/done\n")
    cancel.chmod(0o755)
    (tmp_path / "job.log").write_text("step 12\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr("cli.launch.requeue.LOOK_S", 0.0)
    monkeypatch.setattr("cli.launch.requeue.TURN_S", 0.0)
    monkeypatch.setattr("cli.launch.requeue.LOOKS", 2)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "job", "node", "said"),
    [
        ({}, JOB, DOWN, "n0, where the batch script was, is down, and job 17 is requeued"),
        ({"SLURM_PROCID": "3"}, JOB, DOWN, "n0, where the batch script was, is down, and job 17 is requeued"),
        ({"SLURM_PROCID": "4"}, JOB, DOWN, "processes 1 to 3 of this srun ask Slurm to requeue job 17"),
        (
            {},
            JOB.replace("Requeue=1", "Requeue=0"),
            DOWN,
            "n0, where the batch script was, is down, and job 17 is cancel",
        ),
        ({}, JOB.replace("BatchFlag=1", "BatchFlag=0"), DOWN, "job 17 is interactive"),
        ({}, JOB, UP, "n0, where the batch script of job 17 runs, is not down"),
        ({}, JOB, NOT_HEARD, "n0, where the batch script of job 17 runs, is not down"),
        ({}, "", "", "job 17 is interactive"),
    ],
)
async def test_another_node_has_the_job_requeued_once_slurm_has_the_first_one_as_down(
    changes: dict[str, str], job: str, node: str, said: str, asked: Path
) -> None:
    (asked / "job").write_text(job.format(folder=asked))
    (asked / "node").write_text(node)
    answer = await requeue({**STEP, **changes})
    assert answer.startswith(said)
    done = (asked / "done").read_text() if (asked / "done").exists() else ""
    assert done == ("requeue 17\n" if "is requeued" in said else "cancel 17\n" if "is cancel" in said else "")
    assert (asked / "job.log").read_text() == "step 12\n" + (f"unicron: {answer}\n" if done else "")


@pytest.mark.usefixtures("asked")
async def test_what_slurm_does_not_answer_is_said_with_the_command_for_a_person() -> None:
    said = await requeue(STEP)
    assert said.startswith("`scontrol requeue 17` has it go on from the newest checkpoint (Slurm was asked: cat:")


# ---- the time limit


@pytest.mark.parametrize(
    ("printed", "left"),
    [("1-02:03:04", 93784.0), ("2:00:00", 7200.0), ("59:30", 3570.0), ("0:00", 0.0), ("UNLIMITED", None),
     ("INVALID", None), ("NOT_SET", None), ("", None)],
)  # fmt: skip
def test_the_time_that_is_left_as_squeue_prints_it(printed: str, left: float | None) -> None:
    assert seconds_of(f"{printed}\n") == left


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No squeue is on the path."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_slurm")
def test_without_squeue_the_environment_says_it() -> None:
    assert left_s({}) is None
    assert left_s({"SLURM_JOB_ID": "17"}) is None
    left = left_s({"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": "4102444800"})
    assert left is not None
    assert left > 0


class Slept(Exception):
    """Somebody sleeps. ``seconds``: for so long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"slept {seconds} s")
        self.seconds = seconds


async def no_sleep(seconds: float) -> None:
    raise Slept(seconds)


async def short_sleep(seconds: float) -> None:
    """Sleep for no time if it is asked for less than a second."""
    if seconds > 1:
        raise Slept(seconds)


@pytest.mark.parametrize("margin_s", [None, 0.0])
async def test_without_a_limit_or_a_margin_nothing_is_waited_for(margin_s: float | None) -> None:
    with Interrupts() as interrupts:
        await interrupt_before_limit(interrupts, margin_s, lambda: None if margin_s is None else 10.0)
        assert not interrupts.came.done()


async def test_a_run_is_interrupted_when_the_limit_is_near() -> None:
    with Interrupts() as interrupts:
        await interrupt_before_limit(interrupts, 100.0, lambda: 99.0)
        assert interrupts.at_limit
        assert interrupts.came.done()


@pytest.mark.parametrize(
    ("margin_s", "left", "sleeps_s"), [(None, 400.0, 300.0), (None, 800.0, 500.0 + 100.0), (100.0, 400.0, 300.0)]
)
async def test_the_margin_leaves_a_short_job_most_of_its_time(
    margin_s: float | None, left: float, sleeps_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.launch.time_limit.asyncio.sleep", no_sleep)
    with Interrupts() as interrupts, pytest.raises(Slept) as slept:
        await interrupt_before_limit(interrupts, margin_s, lambda: left)
    assert slept.value.seconds == pytest.approx(sleeps_s, abs=1.0)


async def test_a_limit_that_is_put_off_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.launch.time_limit.asyncio.sleep", short_sleep)
    answers = iter([100.5, 400.0])
    with Interrupts() as interrupts:
        with pytest.raises(Slept) as slept:
            await interrupt_before_limit(interrupts, 100.0, lambda: next(answers))
        assert slept.value.seconds == pytest.approx(300.0, abs=1.0)
        assert not interrupts.at_limit
