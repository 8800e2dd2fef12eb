"""A training that ends with steps left (``end_training()``): behind the same step for all, through faults too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import agent
from tests.unicron.test_scripts import script, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LAST, STEPS = 3, 6

ENDS = f"if step.number == {LAST} and run.generation.rank == 0: step.end_training()"
SECTION = f"if step.completed and step.number == {LAST}:\n        with run.boundary() as section:\n            "
IN_SECTION = f"{SECTION}if run.generation.rank == 0: section.end_training()"


@pytest.mark.parametrize(
    ("fault", "asks"),
    [
        *((fault, {"begin": ENDS, "after": f"{SECTION}pass"}) for fault in ("1:3:1", "0:3:reduce:0", "1:3:update")),
        *(("1:3:section", asks) for asks in ({"begin": ENDS, "after": f"{SECTION}pass"}, {"after": IN_SECTION})),
        ("1:3:update", {"after": IN_SECTION}),
    ],
)
async def test_all_end_behind_the_same_step_though_one_is_lost_in_it(
    fault: str, asks: dict[str, str], tmp_path: Path, spec_file: SpecFile
) -> None:
    """The process that comes has not been asked; behind the section it does no step in which it could be."""
    async with agent(tmp_path / "run") as a:
        spec = spec_file(script=script(tmp_path, **asks), steps=STEPS)
        quiet = await train(a, spec)
        a.messages.clear()
        for worker in ("w2", "w3"):
            await a.fork(worker, spec, {"UNICRON_FAIL_AT": f"{fault}:kill"})
        lost, left = ("w2", "w3") if fault.startswith("0") else ("w3", "w2")
        await a.configure({"w2": "initial", "w3": "initial"})
        await a.until(lambda: lost in a.exits)
        await a.hold([left])
        await a.fork("w4", spec)
        await a.configure({left: "live", "w4": "take"}, fault_step=LAST - 1)
        finished = await a.finished(2)
    assert quiet.step == finished.step == LAST
    assert finished.samples_sha256 == quiet.samples_sha256
    assert largest_difference(finished.parameters_path, quiet.parameters_path) == 0.0
