"""Newcomers that are not what the survivors are: real ranks whose script, or what it reads, is edited meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import Agent, agent, reference_of
from tests.unicron.test_scripts import script
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


async def lose(a: Agent, spec: Path) -> None:
    """Train on two ranks, and lose one in step 4."""
    await a.fork("w0", spec)
    await a.fork("w1", spec, {"UNICRON_FAIL_AT": "1:4:1:hang"})
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


HARMLESS = {
    "nothing is edited": ({}, "pass"),
    "the loop sets the learning rate of each step": (
        {"update": SET_LR.format(lr="0.1 / step.number") + "; run.optimizer.step()"},
        "pass",
    ),
    "the survivor has imported more": ({"after": "step.number == 2 and __import__('later')"}, "later = 1"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "the survivor has imported more" else pytest.mark.slow)
        for name in HARMLESS
    ],
)
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
