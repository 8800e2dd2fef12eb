"""Faults of a script that calls megatron-bridge's ``pretrain``, over a small stand-in for megatron-bridge.

The stand-in (``stand_in/``, this project's own) is what trains where there is no megatron-bridge. It is compared with
the record of the seams, as the release is, so that it cannot match its author alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from cli.launch.checking import checked
from tests.bridge.record import key, parameters
from tests.bridge.test_seams import recorded
from tests.megatron_lm.test_stand_in import (
    STEPS,
    TRACKER,
    alone,
    differing_chunks,
    step_of_an_asked_end,
    through_a_fault,
    without_faults,
)
from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import agent
from unicron.bridge.seams import SEAMS
from unicron.megatron_lm.seams import Seam

STAND_IN = Path(__file__).with_name("stand_in")
SCRIPT = STAND_IN / "train.py"
VERSION = "0.3.1"
"""The release whose seams it has."""

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("seam", SEAMS, ids=key)
def test_the_stand_in_has_the_seams_of_the_record(seam: Seam) -> None:
    assert parameters(seam, STAND_IN) == recorded(VERSION)[key(seam)]


def task(spec_file: SpecFile, saves: Path, *settings: str) -> Path:
    """Return the specification of a task of the script, which is run as it is."""
    given = {"loop": "megatron-bridge", "arguments": [f'checkpoint.save="{saves}"', *settings], "steps": STEPS}
    return spec_file(exact=False, script=str(SCRIPT), deterministic_sums=True, **given)


@pytest.mark.parametrize(
    "at", ["section", *(pytest.param(at, marks=pytest.mark.slow) for at in ("4.backward", "reduce", "update"))]
)
async def test_a_process_that_is_lost_changes_nothing(at: str, tmp_path: Path, spec_file: SpecFile) -> None:
    async with agent(tmp_path / "run") as a:
        expected = await without_faults(a, task(spec_file, tmp_path / "quiet"))
        finished = await through_a_fault(a, task(spec_file, tmp_path / "faulty"), at)
        evaluations = [re.findall("evaluation at .*", a.output(last_rank)) for last_rank in ("q1", "w2")]
    assert len(evaluations[0]) == 5, "three in the training, behind which come validation and test"
    assert evaluations[1] == evaluations[0][2:]
    assert finished.samples_sha256 == expected.samples_sha256
    assert largest_difference(finished.parameters_path, expected.parameters_path) == 0.0
    last = [tmp_path / name / f"iter_{STEPS:07d}" for name in ("quiet", "faulty")]
    one, other = (torch.load(folder / "train_state.pt") for folder in last)
    assert one == other
    assert (one["step"], one["consumed_train_samples"], one["consumed_valid_samples"]) == (STEPS, 72, 36)
    one, other = (torch.load(folder / "model.pt")["scheduler"] for folder in last)
    assert one == other
    assert (tmp_path / "faulty" / TRACKER).read_text() == str(STEPS)
    assert [path.name for path in (tmp_path / "faulty").glob("iter_*")] == [f"iter_{STEPS:07d}"]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["ddp.overlap_grad_reduce=false", "ddp.overlap_grad_reduce=true"])
def test_without_the_adapter_it_trains_to_the_same_parameters(setting: str, tmp_path: Path) -> None:
    stock, ours = (
        alone(one, tmp_path / one, SCRIPT, [f'checkpoint.save="{tmp_path / one}/saved"', setting])
        for one in ("stock", "unicron.bridge")
    )
    assert differing_chunks(stock, ours) == []


@pytest.mark.slow
@pytest.mark.parametrize("asks", ["signal", "stop"])
async def test_a_signal_or_a_stop_leaves_a_checkpoint_of_the_scripts_own(
    asks: str, tmp_path: Path, spec_file: SpecFile
) -> None:
    saves = tmp_path / "saved"
    spec = task(spec_file, saves, "train.exit_signal_handler=true", "checkpoint.save_interval=100")
    step = await step_of_an_asked_end(tmp_path / "run", spec, asks)
    assert (saves / TRACKER).read_text() == str(step)
    assert torch.load(saves / f"iter_{step:07d}" / "train_state.pt")["step"] == step < STEPS


@pytest.mark.slow
def test_a_run_reads_the_settings_from_the_script_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["torchrun", "--nproc-per-node", "2", str(SCRIPT), 'checkpoint.save="a"', "checkpoint.async_save=true"]
    found = checked(command).check
    assert (found.verdict, [one.argument for one in found.findings]) == ("speed-off", ["checkpoint.async_save"])
    assert (found.task["read_by"], found.task["steps"], found.task["saves_every"]) == ("script", STEPS, 3)
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_the_fields_of_a_specification_are_written_for_a_person(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unicron.bridge", "--fields", "task.yaml", str(SCRIPT)]
    subprocess.run([*command, 'checkpoint.save="a"'], cwd=tmp_path, timeout=150, check=True)
    fields = yaml.safe_load((tmp_path / "task.yaml").read_text())
    assert (fields["steps"], fields["checkpoint"], fields["workers"]) == (STEPS, {"every": 3}, {"min": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["task.yaml"]
