"""Newcomers that are not what the survivors are: real ranks whose script, or what it reads, is edited meanwhile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.contract_course import CONTRACT
from tests.unicron.harness import Agent, agent, reference_of
from tests.unicron.test_scripts import script
from tests.unicron.test_snapshots import Nodes
from tests.unicron.zygote import WRITES_AT_ONCE
from unicron.protocol.messages import Checkpointed, Identified, Raised, Resumed

READS = "__import__('json').load(open({path!r}))['{name}']"
"""What a script says to read a number from a JSON file."""

SET_LR = "[group.__setitem__('lr', {lr}) for group in run.optimizer.param_groups]"


class Edit(NamedTuple):
    """What is edited, and what the newcomer says of it."""

    lines: Mapping[str, str]
    """Of the script (``test_scripts.script``)."""
    change: Callable[[Path, Path], object]
    """Takes the script and the JSON file."""
    says: str
    difference: str


def edit_script(old: str, new: str) -> Callable[[Path, Path], object]:
    return lambda path, _: path.write_text(path.read_text().replace(old, new))


def edit_json(_: Path, path: Path) -> None:
    path.write_text(json.dumps({"lr": 0.3}))


ADAM = "torch.optim.AdamW(model.parameters(), lr={lr})"

EDITS = {
    "script": Edit({}, edit_script("lr=0.1", "lr=0.3"), "code: script.py is sha256 ", "code/script.py=sha256 "),
    "json": Edit(
        {"optimizer": ADAM.format(lr="READS")},
        edit_json,
        "optimizer: lr is 0.3 here and 0.1 on rank 0",
        "optimizer/lr",
    ),
    # Before each update the loop sets the learning rate of its step.
    "schedule": Edit(
        {"optimizer": ADAM.format(lr="9"), "update": "SET_LR; run.optimizer.step()"},
        edit_json,
        "optimizer: lr is 0.06 here and 0.02 on rank 0",
        "optimizer/lr",
    ),
    # No hyperparameter: an update multiplies by it behind the optimizer's back.
    "hidden": Edit(
        {"update": "run.optimizer.step(); MULTIPLY"}, edit_json, "parameter: 0.weight[", "parameter/0.weight["
    ),
}


def written(tmp_path: Path, edit: Edit) -> tuple[str, Path]:
    """Write the script and the JSON file that it reads; return both paths."""
    numbers = tmp_path / "numbers.json"
    numbers.write_text(json.dumps({"lr": 0.1}))
    reads = READS.format(path=str(numbers), name="lr")
    path = Path(script(tmp_path, **edit.lines))
    text = path.read_text()
    # What a loop reads once, as it starts.
    text = text.replace("first = True", f"first, number = True, {reads}")
    text = text.replace("READS", reads)
    text = text.replace("SET_LR", SET_LR.format(lr="number / (1 + step.number)"))
    text = text.replace("MULTIPLY", "[p.data.mul_(number) for p in run.model.parameters()]")
    path.write_text(text)
    return str(path), numbers


async def lose(a: Agent, spec: Path, env: Mapping[str, str] | None = None) -> None:
    """Train on two ranks, and lose one in step 4."""
    await a.fork("w0", spec, env)
    await a.fork("w1", spec, {**(env or {}), "UNICRON_FAIL_AT": "1:4:1:hang"})
    await a.configure({"w0": "initial", "w1": "initial"})
    await a.lose("w1", 4)
    await a.hold(["w0"])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "script" else pytest.mark.slow) for name in EDITS]
)
async def test_a_newcomer_that_differs_leaves_and_the_survivor_goes_on(
    name: str, tmp_path: Path, spec_file: SpecFile
) -> None:
    """The result is that of a run without a failure: nothing of the newcomer is in it, nor in a checkpoint."""
    edit = EDITS[name]
    path, numbers = written(tmp_path, edit)
    spec = spec_file(script=path, checkpoint={"every": 1})
    async with agent(tmp_path / "run") as a:
        usual = await reference_of(a, spec)
        a.messages.clear()
        await lose(a, spec)
        edit.change(Path(path), numbers)
        checkpoints = len(a.of(Checkpointed))
        await a.fork("w2", spec)
        generation = await a.configure({"w0": "live", "w2": "take"})
        await a.until(lambda: "w2" in a.exits and a.of(Raised, "w0"))
        (left,) = a.of(Raised, "w2")
        assert (left.kind, left.error, left.generation) == ("differs", "MemberDiffers", generation)
        assert edit.says in left.detail
        assert left.difference.startswith(edit.difference)
        assert a.exits["w2"][1] == 1
        assert not a.of(Resumed, generation=generation)
        assert len(a.of(Checkpointed)) == checkpoints
        await a.hold(["w0"])
        await a.configure({"w0": "live"}, stage="interrupted")
        finished = await a.finished(1)
        assert largest_difference(finished.parameters_path, usual.parameters_path) == 0.0
        assert finished.samples_sha256 == usual.samples_sha256


SPOILS = Edit(
    {
        # No hyperparameter either. Ten times 0.1 is one, so only the edited number changes what a rank has and adds.
        "begin": "[p.data.mul_(10 * number) for p in run.model.parameters()]",
        "backward": "[p.grad.mul_(10 * number) for p in run.model.parameters()]",
        "update": "run.optimizer.step(); [p.data.mul_(10 * number) for p in run.model.parameters()]",
    },
    edit_json,
    "parameter: 0.weight[",
    "parameter/0.weight[",
)


class Undone(NamedTuple):
    """What is known of the state before the update that is undone."""

    checkpoint: Mapping[str, int]
    source: str
    """Where the survivor's state comes from then."""
    steps: int
    """How many are done again."""
    backend: Mapping[str, str] = {}
    """Environment of another backend."""


UNDONE = {
    # The newest copy would be of step 100: of the state before the update there is that alone which is taken for it.
    "copies in memory": Undone({"every": 0, "memory_every": 100}, "memory", 1),
    "copies, on a backend as NCCL's": Undone(
        {"every": 0, "memory_every": 100}, "memory", 1, CONTRACT | {"UNICRON_TEST_CONTRACT": "sockets"}
    ),
    "a checkpoint": Undone({"every": 2, "memory_every": 0}, "checkpoint", 2),
    "neither": Undone({"every": 0, "memory_every": 0}, "own", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNDONE)
async def test_an_update_in_which_a_newcomer_that_differs_had_a_part_is_undone(
    name: str, tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """The step is computed again, from the state before it, wherever that is still known."""
    case = UNDONE[name]
    path, numbers = written(tmp_path, SPOILS)
    spec = spec_file(script=path, checkpoint=case.checkpoint)
    place = {"UNICRON_NODE": "n0", "UNICRON_DOMAIN": "n0", "UNICRON_MEMORY": str(shared_memory / "a")}
    env = {**place, **WRITES_AT_ONCE, **case.backend}
    async with agent(tmp_path / "run") as a:
        usual = await reference_of(a, spec)
        a.messages.clear()
        await lose(a, spec, env)
        edit_json(Path(path), numbers)
        await a.fork("w2", spec, env)
        generation = await a.configure({"w0": "live", "w2": "take"})
        await a.until(lambda: "w2" in a.exits and a.of(Raised, "w0"))
        assert a.of(Raised, "w2")[0].difference.startswith(SPOILS.difference)
        assert not a.of(Resumed, generation=generation)
        await a.hold(["w0"])
        saved = a.of(Checkpointed)[-1].path if a.of(Checkpointed) else ""
        again = await a.configure({"w0": "live"}, stage="interrupted", checkpoint=saved, fault_step=4)
        (resumed,) = await a.resumed(again)
        assert (resumed.source, resumed.steps_recomputed) == (case.source, case.steps)
        finished = await a.finished(1)
        undone = case.steps > 0
        assert (largest_difference(finished.parameters_path, usual.parameters_path) == 0.0) == undone
        assert finished.samples_sha256 == usual.samples_sha256


SPOILS_DIVIDED = """
import json

from unicron import train
from unicron.megatron.model import model_chunks
from unicron.training.step import Step

factor = 10 * {number}
reduce, leave = Step.reduce, Step.__exit__


def parameters(step):
    return [p for chunk in model_chunks(step._host.rank_state.model) for p in chunk.parameters()]


def spoilt_reduce(step):
    reduce(step)
    [p.main_grad.mul_(factor) for p in parameters(step)]


def spoilt_leave(step, *error):
    [p.data.mul_(factor) for p in parameters(step)]
    return leave(step, *error)


Step.reduce, Step.__exit__ = spoilt_reduce, spoilt_leave
train.train(__import__("pathlib").Path(__import__("os").environ["UNICRON_SPEC"]))
"""
"""The built-in trainer. A rank applies another update to its own part of the state, which the others then gather."""


@pytest.mark.slow
async def test_the_update_of_a_divided_optimizer_is_undone(
    tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """The newcomer alone had a part of the state before it; that is in its partner's memory, too."""
    path, numbers = tmp_path / "script.py", tmp_path / "numbers.json"
    path.write_text(SPOILS_DIVIDED.replace("{number}", READS.format(path=str(numbers), name="lr")))
    numbers.write_text(json.dumps({"lr": 0.1}))
    parallel = {"distributed_optimizer": True}
    spec = spec_file(script=str(path), parallel=parallel, checkpoint={"every": 0, "memory_every": 100})
    async with agent(tmp_path / "run") as a:
        usual = await reference_of(a, spec)
        a.messages.clear()
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n1"})
        await nodes.fork("0:3:0:hang")
        await a.configure({"w0": "initial", "w1": "initial"})
        await a.stopped("w0")
        await a.drain(["w0", "w1"])
        edit_json(path, numbers)
        await nodes.fork_one("w2", "n2")
        await a.configure({"w0": "live", "w1": "live", "w2": "take"})
        await a.until(lambda: "w2" in a.exits and a.of(Raised, "w0") and a.of(Raised, "w1"))
        assert a.of(Raised, "w2")[0].difference.startswith("parameter/")
        shutil.rmtree(nodes.folder("n2"))
        await a.hold(["w0", "w1"])
        resumed = await a.resumed(await a.configure({"w0": "live", "w1": "live"}, fault_step=4))
        assert {(r.step, r.steps_recomputed) for r in resumed} == {(4, 1)}
        assert {r.source for r in resumed} <= {"memory", "peer-memory"}
        finished = await a.finished(2)
        assert largest_difference(finished.parameters_path, usual.parameters_path) == 0.0
        assert finished.samples_sha256 == usual.samples_sha256


HARMLESS = {
    "nothing is edited": ({}, "pass"),
    "the loop sets the learning rate of each step": (
        {"update": SET_LR.format(lr="0.1 / step.number") + "; run.optimizer.step()"},
        "pass",
    ),
    "the survivor has imported more": ({"after": "step.number == 2 and __import__('later')"}, "later = 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
async def test_a_newcomer_that_is_what_the_survivors_are_takes_part(
    name: str, tmp_path: Path, spec_file: SpecFile
) -> None:
    lines, later = HARMLESS[name]
    (tmp_path / "later.py").write_text(f"{later}\n")
    spec = spec_file(script=script(tmp_path, **lines))
    async with agent(tmp_path / "run") as a:
        usual = await reference_of(a, spec)
        a.messages.clear()
        await lose(a, spec)
        (identified,) = a.of(Identified)
        assert {"code/script.py", "setting/batch.global", "setting/micro_batches", "version/torch"} <= {
            *identified.identity
        }
        await a.fork("w2", spec)
        await a.resumed(await a.configure({"w0": "live", "w2": "take"}))
        finished = await a.finished(2)
        assert not a.of(Raised, "w2")
        assert largest_difference(finished.parameters_path, usual.parameters_path) == 0.0
        assert len(a.of(Identified)) == 1  # a survivor says what counts


async def test_without_a_survivor_newcomers_are_compared_with_what_the_log_has(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    path = script(tmp_path)
    spec = spec_file(script=path)
    async with agent(tmp_path / "run") as a:
        await a.fork("w0", spec, {"UNICRON_FAIL_AT": "0:3:1:hang"})
        await a.configure({"w0": "initial"})
        await a.stopped("w0")
        (identified,) = a.of(Identified)
        a.kill("w0")
        edit_script("lr=0.1", "lr=0.3")(Path(path), tmp_path)
        await a.fork("w1", spec)
        await a.configure({"w1": "initial"}, fault_step=2, identity=identified.identity)
        await a.until(lambda: "w1" in a.exits)
        (left,) = a.of(Raised, "w1")
        assert left.kind == "differs"
        assert "code: script.py is sha256 " in left.detail
        assert left.detail.endswith("in what the log has recorded")
