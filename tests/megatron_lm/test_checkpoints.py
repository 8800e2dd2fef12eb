"""Checkpoints of Megatron-LM's own ``pretrain_gpt.py``, from a checkout: stock's go on here, and ours in stock."""

from __future__ import annotations

from pathlib import Path
from subprocess import CalledProcessError

import pytest

from tests.megatron_lm import cpu, program
from tests.megatron_lm import test_pretrain_gpt as runs
from tests.megatron_lm.courses import differing, parameters
from tests.unicron.conftest import SpecFile
from tests.unicron.harness import agent
from unicron.protocol.messages import Finished, Resumed

pytestmark = [*runs.pytestmark[:1], pytest.mark.timeout(900), *runs.pytestmark[2:]]

DIVIDED = "--use-distributed-optimizer"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2"
FP16 = f"{runs.FP16} --initial-loss-scale 524288 --train-iters {runs.STEPS}"
"""The first of two updates is skipped."""

CHANGES = {
    "DP1 to DP2": ((1, ""), (2, "")),
    "DP1 to TP2 and SP": ((1, ""), (2, TENSOR)),
    "divided optimizer, bf16, DP1 to DP2 with both overlaps": (
        (1, f"{DIVIDED} --bf16"),
        (2, f"{DIVIDED} --bf16 --overlap-grad-reduce --overlap-param-gather"),
    ),
    "divided optimizer, bf16, DP2 to PP2": (
        (2, f"{DIVIDED} --bf16 --dist-ckpt-optim-fully-reshardable"),
        (2, f"{DIVIDED} --bf16 {PIPELINE}"),
    ),
    "divided optimizer, fp16 with a first update that is skipped": ((1, f"{DIVIDED} {FP16}"), (2, f"{DIVIDED} {FP16}")),
}
"""Ranks and arguments of the run that saves, and of those that go on."""

LOADS = {
    "parameters alone": "--finetune --load",
    "parameters of another folder": "--pretrained-checkpoint",
    "without the optimizer": "--no-load-optim --load",
    "without random states": "--no-load-rng --load",
    "with another schedule": "--override-opt_param-scheduler --lr 2e-2 --load",
}


def saving(folder: Path) -> str:
    """Return the arguments with which a run saves behind every second step."""
    return f"--save {folder} --save-interval 2"


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_goes_on_in_stock_and_here_whoever_has_saved_it(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ranks, arguments), (others, goes_on) = CHANGES[change]
    if DIVIDED in arguments:
        monkeypatch.setenv(cpu.FUSED_ADAM, "1")
    for saves in ("stock", "unicron"):
        runs.run(saves, tmp_path / saves, ranks, f"{arguments} {saving(tmp_path / f'saved-by-{saves}')}")
    found = {
        (loads, saves): runs.run(
            loads, tmp_path / f"{loads}-{saves}", others, f"{goes_on} --ckpt-step 2 --load {tmp_path}/saved-by-{saves}"
        )
        for loads, saves in (("stock", "stock"), ("unicron", "stock"), ("stock", "unicron"))
    }
    for one in (("unicron", "stock"), ("stock", "unicron")):
        assert differing(found["stock", "stock"], found[one]) == [], one


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of stock, of which that behind step 2 is named as the newest."""
    folder = tmp_path_factory.mktemp("stock")
    runs.run("stock", folder / "run", 1, saving(folder / "checkpoints"))
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    return folder / "checkpoints"


@pytest.mark.parametrize("how", LOADS)
def test_what_is_left_out_of_a_checkpoint_is_left_out_here_too(how: str, saved: Path, tmp_path: Path) -> None:
    stock, ours = (runs.run(mode, tmp_path / mode, 1, f"{LOADS[how]} {saved}") for mode in ("stock", "unicron"))
    assert differing(stock, ours) == []


PHASES = f"--train-samples {runs.STEPS * runs.BATCH} --phase-transition-iterations 3"
"""The fourth step reads the first samples of a dataset of its own."""


@pytest.mark.parametrize("asked", ["--exit-interval 3", PHASES, "--exit-duration-in-mins -1", "--exit-signal-handler"])
def test_a_run_that_is_to_exit_early_saves_and_exits_where_stock_does_and_goes_on(asked: str, tmp_path: Path) -> None:
    """Behind the third step, or behind the first of each run.

    A duration below 0 is over by then, and in that step the second rank gets a signal, where the arguments heed one.
    """
    signal = {program.FAULT: "1:forward:3", program.SIGNAL: "SIGTERM"} if "signal" in asked else {}
    ran = {}
    for mode in ("stock", "unicron"):
        folder = tmp_path / f"{mode}-checkpoints"
        for number in range(2):
            named = f"{asked} --save {folder} --save-interval 100 --load {folder}"
            ran[mode, number] = runs.run(mode, tmp_path / f"{mode}-{number}", 2, named, signal)
            saved = "3 4" if " 3" in asked else "1 2"
            assert (folder / "latest_checkpointed_iteration.txt").read_text() == saved.split()[number]
    for number in range(2):
        assert differing(ran["stock", number], ran["unicron", number]) == []


async def test_a_task_that_is_to_exit_early_has_succeeded_though_a_process_is_lost_as_it_saves(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    for name, lost in (("quiet", ""), ("faulty", "save:2")):
        async with agent(tmp_path / f"{name}-agent") as a:
            await runs.train(a, spec_file, tmp_path / name, lost, "--exit-interval 3", applied=3)
            assert {one.step for one in a.of(Finished)} == {3}
        tracker = tmp_path / name / "checkpoints" / "latest_checkpointed_iteration.txt"
        assert tracker.read_text() == "3"
    assert differing(parameters(tmp_path / "quiet"), parameters(tmp_path / "faulty")) == []


@pytest.mark.parametrize("named", ["--pretrained-checkpoint", "--exit-on-missing-checkpoint --load"])
def test_a_folder_without_a_checkpoint_is_refused_where_stock_would_not_train_either(
    named: str, tmp_path: Path
) -> None:
    with pytest.raises(CalledProcessError):
        runs.run("unicron", tmp_path / "run", 1, f"{named} {tmp_path}")
    option = named.split()[-1]
    assert f"InvalidSpec: there is no checkpoint in {option} {tmp_path}" in (tmp_path / "run" / "output").read_text()


async def test_what_was_saved_through_a_fault_goes_on_in_stock(tmp_path: Path, spec_file: SpecFile) -> None:
    """A process is lost while it saves behind step 2."""
    found = []
    for name, lost in (("quiet", ""), ("faulty", "save:1")):
        async with agent(tmp_path / f"{name}-agent") as a:
            await runs.train(a, spec_file, tmp_path / name, lost)
        load = f"--ckpt-step 2 --load {tmp_path / name}/checkpoints {TENSOR}"
        found.append(runs.run("stock", tmp_path / f"{name}-goes-on", 2, load))
    assert differing(*found) == []


async def test_a_task_that_begins_from_stock_s_checkpoint_is_healed(
    saved: Path, tmp_path: Path, spec_file: SpecFile
) -> None:
    for name, lost in (("quiet", ""), ("faulty", "forward:9")):
        async with agent(tmp_path / f"{name}-agent") as a:
            generation = await runs.train(a, spec_file, tmp_path / name, lost, f"--load {saved}", applied=3)
            (resumed, *_) = a.of(Resumed, generation=1 if not lost else generation)
            assert (resumed.source, resumed.step) == (("own", 4) if lost else ("loaded", 3))
    assert differing(parameters(tmp_path / "quiet"), parameters(tmp_path / "faulty")) == []
