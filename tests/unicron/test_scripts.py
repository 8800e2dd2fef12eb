"""A user's own loop: harmless habits, mistakes that are reported, and the state of any torch optimizer."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import Agent, agent
from tests.unicron.test_snapshots import Nodes
from unicron.protocol.messages import Checkpointed, Finished, Progress, Raised, Resumed

SCRIPT = """
import os

import torch

import unicron
from unicron.errors import CommunicationFailed


class GroupAdam(torch.optim.Optimizer):
    '''Counts its steps for a whole group, as fused optimizers do, and replaces the tensors of its state.'''

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                first = state.get("exp_avg", torch.zeros_like(p))
                state["exp_avg"] = 0.9 * first + 0.1 * p.grad
                p.data.sub_(0.1 * state["exp_avg"] / (1.0 - 0.9 ** group["step"]))


def build(tensor, pipeline):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return {model}, {optimizer}


first = True
run = unicron.attach(steps=6, micro_batches=12, build=build)
for step in run.steps():
    with step:
        {begin}
        for k in step.micro_batches():
            inputs = torch.arange(4.0) + step.number + k / 12
            loss = run.model(inputs).square().sum()
            (loss / 12).backward()
            {backward}
            step.commit(k, float(loss), [k])
        step.reduce()
        {update}
    {after}
{tail}
"""


def script(
    folder: Path,
    *,
    model: str = "model",
    optimizer: str = "torch.optim.AdamW(model.parameters(), lr=0.1)",
    begin: str = "pass",
    backward: str = "pass",
    update: str = "run.optimizer.step()",
    after: str = "pass",
    tail: str = "",
) -> str:
    """Write a loop with some lines of its own; return its path."""
    path = folder / "script.py"
    parts = {"model": model, "optimizer": optimizer, "begin": begin, "backward": backward, "update": update}
    text = SCRIPT
    for name, line in (parts | {"after": after, "tail": tail}).items():
        text = text.replace("{" + name + "}", line)
    path.write_text(text)
    return str(path)


async def train(a: Agent, spec: Path, workers: tuple[str, ...] = ("w0", "w1")) -> Finished:
    """Train without a failure."""
    a.messages.clear()
    await asyncio.gather(*(a.fork(worker, spec) for worker in workers))
    await a.configure(dict.fromkeys(workers, "initial"))
    return await a.finished(len(workers))


@pytest.mark.slow
async def test_gradients_that_the_loop_zeroes_do_no_harm(tmp_path: Path, spec_file: SpecFile) -> None:
    async with agent(tmp_path / "run") as a:
        usual = await train(a, spec_file(script=script(tmp_path)))
        zeroing = "run.optimizer.zero_grad(); run.model.zero_grad(set_to_none=True)"
        finished = await train(a, spec_file(script=script(tmp_path, begin=zeroing)), ("w2", "w3"))
        assert largest_difference(finished.parameters_path, usual.parameters_path) == 0.0


MISTAKES = {
    "WrongLoop: a parameter's .grad was replaced": {"backward": "next(run.model.parameters()).grad = None"},
    "WrongLoop: step 1 ended without run.optimizer.step()": {"update": "pass"},
    "WrongLoop: optimizer.step() was called outside of a step": {"after": "run.optimizer.step()"},
    "UnsupportedModel: model: 1 is a batch norm": {
        "model": "torch.nn.Sequential(model, torch.nn.BatchNorm1d(1))",
    },
    "UnsupportedModel: model: must be a module or a list of modules, not dict": {"model": "{'model': model}"},
}


@pytest.mark.parametrize("message", MISTAKES)
async def test_a_mistake_that_would_train_wrongly_is_reported(
    message: str, tmp_path: Path, spec_file: SpecFile
) -> None:
    async with agent(tmp_path / "run") as a:
        await a.fork("w0", spec_file(script=script(tmp_path, **MISTAKES[message])))
        await a.configure({"w0": "initial"})
        await a.until(lambda: "w0" in a.exits)
        (raised,) = a.of(Raised)
        assert f"{raised.error}: {raised.detail}".startswith(message)


@pytest.mark.parametrize(
    ("workers", "leave"),
    [
        (1, "break"),
        (2, "sys.exit()"),
        pytest.param(2, "raise SystemExit(0)", marks=pytest.mark.slow),
        pytest.param(2, "break", marks=pytest.mark.slow),
        pytest.param(1, "sys.exit()", marks=pytest.mark.slow),
        pytest.param(1, "raise SystemExit(0)", marks=pytest.mark.slow),
    ],
)
async def test_a_loop_that_is_left_before_the_last_step_is_a_mistake_that_says_so(
    leave: str, workers: int, tmp_path: Path, spec_file: SpecFile
) -> None:
    after = f"if step.number == 2: import sys; {leave}" if leave != "break" else "if step.number == 2: break"
    spec = spec_file(script=script(tmp_path, after=after))
    names = [f"w{number}" for number in range(workers)]
    async with agent(tmp_path / "run") as a:
        await asyncio.gather(*(a.fork(name, spec) for name in names))
        await a.configure(dict.fromkeys(names, "initial"))
        await a.until(lambda: len(a.exits) == workers)
        assert {(r.kind, r.error, r.step) for r in a.of(Raised)} == {("wrong_loop", "WrongLoop", 3)}
        assert all("behind step 2 of 6" in r.detail for r in a.of(Raised))
        assert len(a.of(Raised)) == workers
        assert {code for _, code in a.exits.values()} == {1}
        assert not a.of(Finished)


async def test_a_script_that_differs_from_its_specification_is_reported(tmp_path: Path, spec_file: SpecFile) -> None:
    async with agent(tmp_path / "run") as a:
        await a.fork("w0", spec_file(script=script(tmp_path), steps=7))
        await a.until(lambda: "w0" in a.exits)
        (raised,) = a.of(Raised)
        assert raised.error == "InvalidSpec"
        assert raised.detail == "steps: the script trains 6, the task's specification says 7"


async def test_checkpoints_follow_the_specification_and_heartbeats_are_reported(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    async with agent(tmp_path / "run") as a:
        path = script(tmp_path, after="run.heartbeat()")
        await train(a, spec_file(script=path, checkpoint={"every": 4}), ("w0",))
        assert [m.step for m in a.of(Checkpointed)] == [4, 6], "the last step, since the script may go on behind it"
        assert {m.step for m in a.of(Progress) if m.phase == "aside"} >= {1, 2, 3, 4, 5}


@pytest.mark.slow
@pytest.mark.parametrize("source", ["live", "memory"])
async def test_an_optimizer_that_counts_steps_of_a_group_and_replaces_its_tensors(
    source: str, tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """A process that receives the state goes on with the count of steps and the newest tensors."""
    optimizer = "GroupAdam(model.parameters(), {})"
    spec = spec_file(script=script(tmp_path, optimizer=optimizer), checkpoint={"every": 0, "memory_every": 3})
    async with agent(tmp_path / "run") as a:
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n1"})
        if source == "live":
            await nodes.fork("1:4:1:hang")
            await a.configure({"w0": "initial", "w1": "initial"})
            await a.lose("w1", 4)
            await a.hold(["w0"])
            await nodes.fork_one("w2", "n2")
            resumed = await a.resumed(await a.configure({"w0": "live", "w2": "take"}))
        else:
            applied = await nodes.lose("w1", 4)
            shutil.rmtree(nodes.folder("n1"))
            resumed = await nodes.restore(applied)
            assert {r.source for r in resumed} == {"memory", "peer-memory"}
            assert all(r.step > 2 for r in resumed)
        finished = await a.finished(2)
        usual = await train(a, spec, ("w3", "w4"))
        assert largest_difference(finished.parameters_path, usual.parameters_path) <= 1e-6


async def test_an_update_counts_as_completed_though_the_block_fails_after_it(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    """A failure after the optimizer's step, inside the block: the step is applied, and ``step.completed`` is true."""
    breaks = (
        "run.optimizer.step(); fails, first = first and step.number == 3, first and step.number != 3\n"
        "        if fails and os.environ['UNICRON_WORKER'] == 'w0': raise CommunicationFailed('injected')"
    )
    note = f"open('{tmp_path}/' + os.environ['UNICRON_WORKER'], 'a').write(f'{{step.number}} ' * step.completed)"
    spec = spec_file(script=script(tmp_path, update=breaks, after=note))
    async with agent(tmp_path / "run") as a:
        await asyncio.gather(*(a.fork(worker, spec) for worker in ("w0", "w1")))
        await a.configure({"w0": "initial", "w1": "initial"})
        await a.until(lambda: a.of(Raised, "w0"))
        await a.in_step(["w1"], 3, "ended")
        await a.hold(["w0", "w1"])
        await a.configure({"w0": "live", "w1": "live"}, stage="interrupted")
        await a.finished(2)
    assert {(tmp_path / worker).read_text() for worker in ("w0", "w1")} == {"1 2 3 4 5 6 "}


GATED = """
import pathlib, time
rank, gate = run.generation.rank, pathlib.Path(os.environ["GATE"])
assert not list(run.steps()), "there is no further step"
while rank == 1 and not gate.exists():
    time.sleep(0.01)
{then}
"""
"""Code behind the loop; that of rank 1 waits for a file."""


async def behind_the_last_step(a: Agent, spec: Path, gate: Path, source: str = "initial", checkpoint: str = "") -> None:
    """Train with two ranks until rank 1 waits in its code behind the loop, and rank 0 for the end of rank 1."""
    before = len(a.of(Finished))
    await asyncio.gather(*(a.fork(worker, spec, {"GATE": str(gate)}) for worker in ("w0", "w1")))
    await a.configure({"w0": source, "w1": source}, checkpoint=checkpoint)
    await a.until(lambda: len(a.of(Finished)) == before + 2)
    assert not any(message.ended for message in a.of(Finished)[before:])
    await a.until(lambda: all(a.phases(worker)[-1] == (6, "tail") for worker in ("w0", "w1")))


async def test_the_end_of_the_scripts_is_the_end_of_the_task(tmp_path: Path, spec_file: SpecFile) -> None:
    gate = tmp_path / "gate"
    async with agent(tmp_path / "run") as a:
        spec = spec_file(script=script(tmp_path, tail=GATED.format(then="print('done', flush=True)")))
        await behind_the_last_step(a, spec, gate)
        gate.touch()
        finished = await a.finished(2)
        assert [m.rank for m in a.of(Finished) if m.ended] == [1, 0], "rank 0 waits for all others"
        assert finished.parameters_path
        assert all("done" in a.output(worker) for worker in ("w0", "w1"))


@pytest.mark.slow
@pytest.mark.parametrize(("then", "code"), [("raise ValueError('no room')", 1), ("raise SystemExit(3)", 3)])
async def test_a_failure_behind_the_last_step_is_one_and_only_that_part_is_repeated(
    then: str, code: int, tmp_path: Path, spec_file: SpecFile
) -> None:
    gate = tmp_path / "gate"
    async with agent(tmp_path / "run") as a:
        failing = spec_file(script=script(tmp_path, tail=GATED.format(then=f"if rank == 1: {then}")))
        await behind_the_last_step(a, failing, gate)
        (saved,) = a.of(Checkpointed)
        assert saved.step == 6
        gate.touch()
        await a.until(lambda: "w1" in a.exits)
        assert a.exits["w1"][1] == code
        assert [f"{m.error}: {m.detail}" for m in a.of(Raised)] == (["ValueError: no room"] if code == 1 else [])
        assert not any(m.ended for m in a.of(Finished)), "rank 0 waits for an end that does not come"
        a.kill("w0")
        await a.until(lambda: "w0" in a.exits)
        gate.unlink()
        script(tmp_path, tail=GATED.format(then="print('repeated', flush=True)"))
        await behind_the_last_step(a, failing, gate, "checkpoint", saved.path)
        gate.touch()
        await a.finished(2)
        assert {(m.step, m.source) for m in a.of(Resumed, generation=2)} == {(6, "checkpoint")}
        assert "repeated" in a.output("w0")
