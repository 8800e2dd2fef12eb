"""State of the user's own (``attach(state=...)``): at the end it is what it is without a failure, on every rank."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unicron.changed_examples import changed_example
from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import Agent, agent
from tests.unicron.test_snapshots import Nodes
from tests.unicron.zygote import WRITES_AT_ONCE, zygote
from unicron.protocol.messages import Checkpointed, Finished, Raised

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import hashlib, json, os
import torch
import unicron
from unicron.errors import CommunicationFailed

CRASHES = {crashes}  # worker -> step in which a collective of the script breaks, between the update and its state
WORKER = os.environ.get("UNICRON_WORKER", "alone")


class Average:
    '''Of the weights, in double precision.'''

    def __init__(self, model):
        self.weights = {n: p.detach().double() for n, p in model.named_parameters()}

    def update(self, model):
        for n, p in model.named_parameters():
            self.weights[n].mul_(0.75).add_(p.detach(), alpha=0.25)

    def state_dict(self):
        return {"decay": 0.75, "weights": self.weights}

    def load_state_dict(self, state):
        assert state["decay"] == 0.75 and state["weights"].keys() == self.weights.keys()
        self.weights = state["weights"]


class Samples:
    seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def check_variables():
    # torchrun's variables are those of the present generation.
    if WORKER != "alone":
        own = torch.distributed.get_rank(), torch.distributed.get_world_size()
        assert (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) == own


def build(tensor, pipeline):
    check_variables()
    torch.manual_seed(WORKER == "w1")  # the average begins with rank 0's parameters
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def advance():
    run.state["scheduler"].step()
    run.state["average"].update(run.model)
    run.state["samples"].seen += 12


state = {
    # Each rate follows from the one before: the optimizer's groups have to move too.
    "scheduler": lambda model, optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    "average": lambda model, optimizer: Average(model),
    "samples": Samples(),
}
{changes}
run = unicron.attach(steps=8, micro_batches=12, build=build, state=state, exact=True)
for step in run.steps():
    with step:
        check_variables()
        {begin}
        for k in step.micro_batches():
            loss = run.model(torch.arange(4.0) + step.number + k / 12).square().sum()
            (loss / 12).backward()
            step.commit(k, float(loss), [k])
        step.reduce()
        run.optimizer.step()
        if CRASHES.get(WORKER) == step.number:
            del CRASHES[WORKER]
            raise CommunicationFailed("injected")
        {inside}
    {behind}

average = b"".join(weights.numpy().tobytes() for weights in run.state["average"].weights.values())
found = {
    "seen": run.state["samples"].seen,
    "epochs": run.state["scheduler"].last_epoch,
    "lr": run.optimizer.param_groups[0]["lr"],
    "average": hashlib.sha256(average).hexdigest(),
}
with open({folder} + "/" + WORKER + ".json", "w") as file:
    json.dump(found, file)
"""

INSIDE = {"inside": "advance()"}
BEHIND = {"behind": "if step.completed: advance()"}


def script(folder: Path, **parts: str) -> str:
    """Write a loop with some lines of its own; return its path."""
    lines = {"crashes": "{}", "changes": "", "begin": "pass", "inside": "pass", "behind": "pass"}
    text = SCRIPT
    for name, line in (lines | {"folder": repr(str(folder))} | parts).items():
        text = text.replace("{" + name + "}", line)
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


@functools.cache
def alone(folder: Path) -> tuple[dict[str, Any], Path]:
    """Train without an agent and without a failure; return the user's state at the end, and the parameters."""
    folder.mkdir()
    zygote().run([script(folder, **INSIDE)], folder)
    return read(folder, "alone"), folder / "unicron-run" / "result" / "parameters.safetensors"


def read(folder: Path, worker: str) -> dict[str, Any]:
    """Return what a worker has written at its end."""
    found: dict[str, Any] = json.loads((folder / f"{worker}.json").read_text())
    return found


async def check(folder: Path, finished: Finished, members: list[str]) -> None:
    """Compare what every member has at the end with what a run alone, without a failure, has."""
    expected, parameters = await asyncio.to_thread(alone, folder.parent / "user-state-alone")
    assert expected["seen"] == 12 * 8
    assert {worker: read(folder, worker) for worker in members} == dict.fromkeys(members, expected)
    assert largest_difference(finished.parameters_path, parameters) == 0.0


async def begin(a: Agent, spec: Path, faults: Mapping[str, str]) -> None:
    """Start a task with a worker for each of some faults."""
    await asyncio.gather(*(a.fork(worker, spec, {"UNICRON_FAIL_AT": fault}) for worker, fault in faults.items()))
    await a.configure(dict.fromkeys(faults, "initial"))


@pytest.mark.slow
@pytest.mark.parametrize("place", [INSIDE, BEHIND], ids=["inside", "behind"])
async def test_it_moves_to_processes_that_replace_lost_ones(
    place: Mapping[str, str], tmp_path: Path, spec_file: SpecFile
) -> None:
    """In the middle of a step; and in an update that the others have applied."""
    async with agent(tmp_path / "run") as a:
        spec = spec_file(script=script(tmp_path, **place), steps=8)
        await begin(a, spec, {"w0": "", "w1": "1:3:1:hang"})
        await a.lose("w1", 3)
        await a.hold(["w0"])
        await a.fork("w2", spec, {"UNICRON_FAIL_AT": "1:5:apply:hang:always"})
        await a.configure({"w0": "live", "w2": "take"})
        await a.lose("w2", 6)
        await a.hold(["w0"])
        await a.fork("w3", spec)
        await a.configure({"w0": "live", "w3": "take"})
        await check(tmp_path, await a.finished(2), ["w0", "w3"])


@pytest.mark.parametrize("place", [INSIDE, pytest.param(BEHIND, marks=pytest.mark.slow)], ids=["inside", "behind"])
async def test_a_fault_between_the_update_and_its_state(
    place: Mapping[str, str], tmp_path: Path, spec_file: SpecFile
) -> None:
    """On one rank, on all of them, and on one in the last step: the state follows each update once."""
    async with agent(tmp_path / "run") as a:
        path = script(
            tmp_path, crashes="{'w0': 3, 'w2': 8}", begin="CRASHES.update(once(step.number))", changes=ONCE, **place
        )
        await begin(a, spec_file(script=path, steps=8), {"w0": "", "w1": ""})
        await a.until(lambda: a.of(Raised, "w0"))
        await a.in_step(["w1"], 3, "ended")
        await a.hold(["w0", "w1"])
        await a.configure({"w0": "live", "w1": "live"}, stage="interrupted")
        await a.until(lambda: len(a.of(Raised)) == 3)
        await a.hold(["w0", "w1"])
        await a.fork("w2", spec_file(script=path, steps=8))
        await a.configure({"w0": "live", "w1": "live", "w2": "take"})
        # w2 has the last update, and waits nevertheless: it may not finish a task whose failure it has reported.
        await a.in_step(["w2"], 9, "waiting")
        await a.hold(["w0", "w1", "w2"])
        await a.configure(dict.fromkeys(["w0", "w1", "w2"], "live"))
        await check(tmp_path, await a.finished(3), ["w0", "w1", "w2"])


ONCE = """
CRASHED = []

def once(number):
    # All ranks that are there from the beginning, in their first try of step 6.
    if number == 6 and WORKER in ("w0", "w1") and not CRASHED:
        CRASHED.append(number)
        return {WORKER: number}
    return {}
"""


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["memory", "checkpoint"])
async def test_it_outlives_all_processes(kept: str, tmp_path: Path, spec_file: SpecFile, shared_memory: Path) -> None:
    checkpoint = {"every": 2, "memory_every": 0} if kept == "checkpoint" else {"every": 0, "memory_every": 4}
    async with agent(tmp_path / "run") as a:
        spec = spec_file(script=script(tmp_path, **BEHIND), steps=8, checkpoint=checkpoint)
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n1"})
        if kept == "memory":
            applied = await nodes.lose("w1", 5)
        else:
            await nodes.fork("1:6:0:hang")
            await a.configure({"w0": "initial", "w1": "initial"})
            await a.lose("w1", 6)
            a.kill("w0")
            await a.until(lambda: "w0" in a.exits)
            applied = 5
        resumed = await nodes.restore(applied)
        assert {r.source for r in resumed} <= ({"checkpoint"} if kept == "checkpoint" else {"memory", "peer-memory"})
        assert {r.step for r in resumed} == {5}
        await check(tmp_path, await a.finished(2), ["w0", "w1"])


async def test_a_checkpoint_may_have_more_or_less_than_the_script_gives(tmp_path: Path, spec_file: SpecFile) -> None:
    async with agent(tmp_path / "run") as a:
        less = script(
            tmp_path, changes="state['former'] = state.pop('samples')", inside="run.state['scheduler'].step()"
        )
        spec = spec_file(script=less, steps=8, checkpoint={"every": 4})
        await a.fork("w0", spec, {"UNICRON_FAIL_AT": "0:6:0:hang"} | WRITES_AT_ONCE)
        await a.configure({"w0": "initial"})
        await a.stopped("w0")
        saved = (await a.until(lambda: a.of(Checkpointed)))[-1].path
        a.kill("w0")
        await a.until(lambda: "w0" in a.exits)
        script(tmp_path, **INSIDE)
        await a.fork("w1", spec)
        await a.configure({"w1": "checkpoint"}, checkpoint=saved)
        await a.finished(1)
        assert f"checkpoint {saved}: it has no state 'samples', which begins anew" in a.output("w1")
        assert f"checkpoint {saved}: its state 'former' is not used: the script gives no such object" in a.output("w1")
        found = read(tmp_path, "w1")
        assert (found["seen"], found["epochs"]) == (12 * 4, 8)


REFUSED = {
    r"UnsupportedState: state: samples.seen is of type builtins.object, which cannot be saved": {
        "changes": "Samples.seen = object()"
    },
    "UnsupportedState: state: samples: not the same on ranks 0 and 1.": {
        "inside": "run.state['samples'].seen += run.generation.rank"
    },
    "WrongLoop: the state scheduler, average, samples has changed before the update was applied": {
        "begin": "run.state['samples'].seen += 1"
    },
}


@pytest.mark.parametrize("message", REFUSED)
async def test_what_would_go_wrong_after_a_failure_is_refused_before_one(
    message: str, tmp_path: Path, spec_file: SpecFile
) -> None:
    async with agent(tmp_path / "run") as a:
        await begin(a, spec_file(script=script(tmp_path, **REFUSED[message]), steps=8), {"w0": "", "w1": ""})
        raised = (await a.until(lambda: a.of(Raised)))[0]
        assert f"{raised.error}: {raised.detail}".startswith(message)


MEGATRON = {
    "import torch\n": "import torch\nfrom unicron.errors import CommunicationFailed\n",
    "STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = 60, 8, 2": "STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = 8, 4, 2",
    "overlap_grad_reduce=False": "overlap_grad_reduce=False, use_distributed_optimizer=True",
    "OptimizerConfig(": "OptimizerConfig(use_distributed_optimizer=True, min_lr=0.0, ",
    "run = unicron.attach(": """
class Copy:
    def __init__(self, model: Any) -> None:
        self.weights = {name: value.detach().clone() for name, value in model.named_parameters()}

    def state_dict(self) -> Any:
        return {"nested": [self.weights]}

    def load_state_dict(self, state: Any) -> None:
        self.weights = state["nested"][0]

    def check(self, model: Any) -> None:
        for name, value in model.named_parameters():
            assert torch.equal(value, self.weights[name]), (step.number, name)


def scheduler(model: Any, optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=2e-3, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=10,
        lr_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=0, wd_incr_style="constant",
    )


crashed = []
state = {"copy": lambda model, optimizer: Copy(model), "scheduler": scheduler}
run = unicron.attach(state=state, """,
    "    with step:  # +\n": """    with step:  # +
        if not step.completed:
            run.state["copy"].check(run.model)
            assert run.state["scheduler"].num_steps == step.number - 1
            assert abs(run.optimizer.param_groups[0]["lr"] - 2e-4 * (11 - step.number)) < 1e-9
""",
    "        run.optimizer.step()\n": """        success, _, _ = run.optimizer.step()
        assert success
        if step.number == 6 and not crashed:
            crashed.append(step.number)
            raise CommunicationFailed("injected")
        run.state["scheduler"].step(1)
        for name, value in run.model.named_parameters():
            run.state["copy"].weights[name].copy_(value.detach())
""",
}


DECOUPLED = {
    "STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = 60, 8, 2": "STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = 8, 3, 2",
    "SEQUENCE_LENGTH, VOCABULARY = 2,": "SEQUENCE_LENGTH, VOCABULARY = 3,",
    "weight_decay=0.01,": "weight_decay=0.01, min_lr=0.0, decoupled_lr=4e-3, decoupled_min_lr=0.0,",
    "run = unicron.attach(": """
def scheduler(model: Any, optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=2e-3, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=10,
        lr_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=0, wd_incr_style="constant",
    )


run = unicron.attach(state={"scheduler": scheduler}, """,
    "    with step:  # +\n": """    with step:  # +
        for group in run.optimizer.param_groups:
            assert abs(group["lr"] - group["max_lr"] * (11 - step.number) / 10) < 1e-9, (step.number, group)
        assert {group["max_lr"] for group in run.optimizer.param_groups} == {2e-3, 4e-3}
""",
    "        run.optimizer.step()\n": """        run.optimizer.step()
        run.state["scheduler"].step(1)
""",
}


@pytest.mark.slow
async def test_stages_without_some_group_of_the_optimizer_follow_its_numbers(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    """With a learning rate of its own for embeddings the stage in the middle of three has nothing that follows it."""
    path = changed_example("megatron_gpt.py", DECOUPLED.items(), tmp_path)
    spec = spec_file(script=str(path), steps=8, batch={"global": 6, "micro": 2}, exact=False)
    async with agent(tmp_path / "run") as a:
        workers = ["w0", "w1", "w2"]
        fault = {"UNICRON_FAIL_AT": "*:3:0:communication,*:5:0:communication,*:7:0:communication"}
        await asyncio.gather(*(a.fork(worker, spec, fault) for worker in workers))
        await a.configure(dict.fromkeys(workers, "initial"), pipeline=3)
        # The rank that has all groups first has none of the middle's numbers alone; then it comes last.
        for errors, order, pipeline in ((3, "012", 1), (6, "201", 3), (9, "120", 3)):
            await a.until(lambda: len(a.of(Raised)) >= errors)  # noqa: B023
            assert {one.error for one in a.of(Raised)} == {"CommunicationFailed"}
            await a.hold(workers)
            await a.configure({f"w{number}": "live" for number in order}, pipeline=pipeline)
        finished = await a.finished(3)
        assert (finished.step, len(a.of(Raised))) == (8, 9)


async def test_it_moves_between_layouts_as_the_parameters_do(tmp_path: Path, spec_file: SpecFile) -> None:
    """From tensor to pipeline to data parallelism; there all ranks lose step 6 between update and state."""
    path = changed_example("megatron_gpt.py", MEGATRON.items(), tmp_path)
    spec = spec_file(script=str(path), steps=8, batch={"global": 8, "micro": 2}, exact=False)
    async with agent(tmp_path / "run") as a:
        workers = ["w0", "w1"]
        fault = {"UNICRON_FAIL_AT": "*:3:0:communication,*:5:0:communication"}
        await asyncio.gather(*(a.fork(worker, spec, fault) for worker in workers))
        await a.configure(dict.fromkeys(workers, "initial"), tensor=2)
        for errors, pipeline in ((2, 2), (4, 1), (6, 1)):
            await a.until(lambda: len(a.of(Raised)) >= errors)  # noqa: B023
            assert {one.error for one in a.of(Raised)} == {"CommunicationFailed"}
            await a.hold(workers)
            await a.configure(dict.fromkeys(workers, "live"), pipeline=pipeline)
        finished = await a.finished(2)
        assert (finished.step, len(a.of(Raised))) == (8, 6)
