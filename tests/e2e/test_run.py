"""``unicron run`` without a cluster: one command gives a healed run, and leaves no process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.condition import until_blocking
from tests.e2e.by_hand import UNICRON, until_gone
from tests.e2e.kit import Client, processes_of, rank
from tests.megatron_lm.test_stand_in import STAND_IN

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

SCRIPT = """
import os, sys, time
import torch
import unicron
import beside

STEPS, MICRO_BATCHES = int(sys.argv[1]), 4

def build(tensor, pipeline):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-2)

print("at", os.getcwd(), os.environ["MINE"], len(os.environ["MY_TOKEN"]), beside.FOUND, beside.__file__, flush=True)
run = unicron.attach(steps=STEPS, micro_batches=MICRO_BATCHES, build=build, checkpoint_every=1000)
for step in run.steps():
    with step:
        for k in step.micro_batches():
            if os.path.exists("slow"):
                time.sleep(0.05)
            loss = run.model(torch.ones(2, 8)).square().mean()
            torch.autograd.backward(loss / MICRO_BATCHES)
            step.commit(k, loss, [k])
        step.reduce()
        run.optimizer.step()
    if step.completed and run.generation.rank == 0:
        print("step", step.number, flush=True)
"""
"""Works where it is run, with variables of all kinds; slow as long as a file exists."""

PLAIN = """
import os, pathlib, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
saved = pathlib.Path("saved")
begin = int(saved.read_text()) if saved.exists() else 0
for step in range(begin + 1, int(sys.argv[1]) + 1):
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        pathlib.Path("new").write_text(str(step))
        pathlib.Path("new").rename(saved)
        print("step", step, flush=True)
    if os.path.exists("slow"):
        time.sleep(0.05)
dist.destroy_process_group()
"""
"""A loop of its own, without a line of the library, that goes on from where it was."""

REFUSED_AT_START = """
import importlib
import torch
importlib.import_module("unicron.megatron.cpu").enable()
import pretrain_gpt as script
from megatron.training import pretrain

def provide_model(*args, **kwargs):
    model = script.provide_model(*args, **kwargs)
    model.statistics = torch.nn.BatchNorm1d(1, affine=False)
    return model

pretrain(script.provide_datasets, provide_model, script.ModelType.encoder_or_decoder, script.forward_step)
"""
"""Calls Megatron-LM's ``pretrain`` with a model that no argument shows, and that does not heal inside the step."""

STEPS = 300

REST = {
    "model": {"layers": 1, "hidden": 8, "heads": 1, "sequence_length": 1},
    "batch": {"global": 8, "micro": 2},
    "steps": STEPS,
}

SPEC = ("--spec", "rest.yaml")

TOKEN = "not-to-be-written"


class Running:
    """A run of the script in a folder, by torchrun's command line."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        script: str = SCRIPT,
        arguments: Sequence[str] = (str(STEPS),),
        path: str = "lib",
        rest: Mapping[str, object] = REST,
    ) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        (folder / "lib").mkdir(exist_ok=True)
        (folder / "lib" / "beside.py").write_text("FOUND = 'found'\n")
        (folder / "train.py").write_text(script)
        (folder / "rest.yaml").write_text(yaml.safe_dump(dict(rest)))
        self._out, self._err = (folder / "out").open("wb"), (folder / "err").open("wb")
        command = [f"PYTHONPATH={path}", "MINE=7", "torchrun", "--nproc-per-node", "2", "train.py", *arguments]
        self.process = subprocess.Popen(
            [*UNICRON, "run", "--run-dir", "run", *options, "--", *command],
            cwd=folder,
            env=os.environ | {"MY_TOKEN": TOKEN},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    @property
    def out(self) -> str:
        """What its ranks have printed so far."""
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        """What it has said so far."""
        return (self.folder / "err").read_text()

    def until(self, holds: Callable[[], object]) -> None:
        """Wait until ``holds`` is true."""

        def holds_while_it_runs() -> object:
            assert self.process.poll() is None, self.err
            return holds()

        until_blocking(holds_while_it_runs, limit_s=90.0, seen=lambda: (self.out, self.err))

    def at_work(self) -> Client:
        """Wait until some steps are done; return a client of its stack."""
        self.until(lambda: self.out.count("| step ") > 5)
        found = re.search(r"live page: (\S+)/", self.err)
        assert found is not None
        return Client(found[1])

    def terminate_all(self) -> None:
        """Send SIGTERM to all of its processes, as a control group's manager does."""
        top = psutil.Process(self.process.pid)
        for process in [top, *top.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.terminate()

    def end(self) -> int:
        """Wait for its end; return its exit status."""
        code = self.process.wait(90)
        self._out.close()
        self._err.close()
        return code


def steps_of(running: Running) -> list[int]:
    """Return the steps that were printed as done."""
    return [int(step) for step in re.findall(r"\| step (\d+)", running.out)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The working directory, in which the script is slow."""
    (tmp_path / "slow").touch()
    yield tmp_path
    for pid in processes_of(tmp_path / "run"):
        os.kill(pid, signal.SIGKILL)


def test_one_command_gives_a_healed_run(folder: Path) -> None:
    running = Running(folder, *SPEC)
    with running.at_work() as client:
        task = client.task("train")
        assert task["spec"]["env"] == {"UNICRON_WORKING_DIRECTORY": str(folder)}
        assert task["spec"]["workers"] == {"min": 1, "max": 2}
        os.kill(rank(task, 1)["pid"], signal.SIGKILL)
        running.until(lambda: "generation 2 from" in running.out)
    (api,) = (pid for pid in processes_of(running.run_dir) if "services.api.main" in psutil.Process(pid).cmdline())
    os.kill(api, signal.SIGKILL)  # it is started again, and nothing of the output is lost or comes twice
    (folder / "slow").unlink()
    assert running.end() == 0, running.err
    assert processes_of(running.run_dir) == []
    assert f"| at {folder} 7 {len(TOKEN)} found {folder}/lib/beside.py\n" in running.out
    assert steps_of(running) == [*range(1, STEPS + 1)]
    last = running.err.splitlines()[-1]
    assert re.fullmatch(rf"unicron: train succeeded at step {STEPS} of {STEPS}; 1 fault healed, \S+ s lost; \S+", last)
    assert "process-exit" in (folder / last.split()[-1]).read_text()
    kept = [path for path in running.run_dir.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert kept == [], "a variable that processes inherit is written nowhere"


def test_a_script_without_a_line_of_the_library_restarts_whole(folder: Path) -> None:
    running = Running(folder, script=PLAIN)
    with running.at_work() as client:
        assert client.task("train")["spec"]["loop"] == "restart"
        scripts = [pid for pid in processes_of(running.run_dir) if "-u" in psutil.Process(pid).cmdline()]
        assert len(scripts) == 2
        os.kill(scripts[1], signal.SIGKILL)
        running.until(lambda: running.out.count("generation 2 from script") == 2)
    (folder / "slow").unlink()
    assert running.end() == 0, running.err
    assert processes_of(running.run_dir) == []
    assert steps_of(running) == [*range(1, STEPS + 1)]
    last = running.err.splitlines()[-1]
    assert re.fullmatch(r"unicron: train succeeded; 1 fault healed, \S+ s until the script ran again; \S+", last)


def test_code_that_comes_along_is_run_from_a_copy_which_goes_with_the_task(folder: Path) -> None:
    (folder / ".gitignore").write_text("/run/\n/out\n/err\n/slow\n")
    running = Running(folder, *SPEC, "--ship", ".")
    assert running.end() == 0, running.err
    (digest,) = re.findall(r"comes along: 4 files, \d+ bytes, sha256 (\w+)", running.err)
    copy = folder / "run" / "tasks" / "train" / "code" / "n0" / digest
    assert f"| at {copy} 7 {len(TOKEN)} found {copy}/lib/beside.py\n" in running.out
    assert running.out.count(f"unicron: runs the code {digest}") == 2
    assert steps_of(running) == [*range(1, STEPS + 1)]
    assert not copy.exists()


def test_what_is_refused_as_it_starts_restarts_whole(folder: Path) -> None:
    steps, saved = 6, folder / "saved"
    arguments = f"--train-iters {steps} --global-batch-size 12 --eval-interval 2 --save-interval 3 --save {saved}"
    running = Running(
        folder,
        *SPEC,
        script=REFUSED_AT_START,
        arguments=arguments.split(),
        path=str(STAND_IN),
        rest=REST | {"steps": steps, "batch": {"global": 12, "micro": 1}},
    )
    assert running.end() == 0, running.err
    why = r"model: \S*statistics is a batch norm that trains"
    assert re.search(
        f"train is not healed inside the step, and restarts whole from its own checkpoint: {why}", running.err
    )
    assert running.err.splitlines()[-1].startswith("unicron: train succeeded")
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(steps)


def test_ctrl_c_stops_it_with_a_checkpoint_and_the_same_command_goes_on(folder: Path) -> None:
    killed = Running(folder, *SPEC)
    killed.at_work().http.close()
    killed.process.kill()
    killed.end()
    until_gone(killed.run_dir)

    stopped = Running(folder, *SPEC, "--on-interrupt", "stop")
    stopped.at_work().http.close()
    assert "train goes on" in stopped.err
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.end() == 1
    assert processes_of(stopped.run_dir) == []
    found = re.search(r"train stopped at step (\d+) of \d+; .* saved in ([^;\s]+)", stopped.err)
    assert found is not None, stopped.err
    assert Path(found[2]).is_dir()

    (folder / "slow").unlink()
    again = Running(folder, *SPEC)
    assert again.end() == 0, again.err
    assert f"train goes on from step {found[1]};" in again.err
    assert steps_of(again) == [*range(int(found[1]) + 1, STEPS + 1)], "nothing of the earlier runs is printed again"


def test_sigterm_to_all_of_its_processes_stops_it_as_well(folder: Path) -> None:
    stopped = Running(folder, *SPEC)
    stopped.at_work().http.close()
    stopped.terminate_all()
    assert stopped.end() == 1, stopped.err
    assert processes_of(stopped.run_dir) == []
    found = re.search(r"train stopped at step (\d+) of \d+; .* saved in ([^;\s]+)", stopped.err)
    assert found is not None, stopped.err
    assert steps_of(stopped) == [*range(1, int(found[1]) + 1)], "no rank was lost"
    assert Path(found[2]).is_dir()


def test_sigterm_to_all_processes_of_a_script_that_restarts_whole_is_no_fault(folder: Path) -> None:
    stopped = Running(folder, script=PLAIN)
    stopped.at_work().http.close()
    stopped.terminate_all()
    assert stopped.end() == 1, stopped.err
    assert processes_of(stopped.run_dir) == []
    assert stopped.err.splitlines()[-1].startswith("unicron: train stopped; stopped as asked")


def test_a_script_that_misses_its_peer_before_sigterm_comes_to_it_is_no_fault(folder: Path) -> None:
    stopped = Running(folder, script=PLAIN)
    stopped.at_work().http.close()
    first, other = (pid for pid in processes_of(stopped.run_dir) if "-u" in psutil.Process(pid).cmdline())
    os.kill(first, signal.SIGTERM)
    stopped.until(lambda: not psutil.pid_exists(other))
    stopped.terminate_all()
    assert stopped.end() == 1, stopped.err
    assert processes_of(stopped.run_dir) == []
    assert stopped.err.splitlines()[-1].startswith("unicron: train stopped; stopped as asked")
