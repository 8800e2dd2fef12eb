"""The table of seams: what the adapter needs of Megatron-LM, against the record of a release and its checkout."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.launch.script import core_of
from tests.megatron_lm.record import RECORD, parameters
from unicron.errors import InvalidSpec, NotHealed, SeamDiffers
from unicron.megatron_lm import seams, settings
from unicron.megatron_lm.samples import sample_ids
from unicron.megatron_lm.seams import SEAMS, VERSIONS, Seam

CHECKOUT = os.environ.get("UNICRON_MEGATRON_LM", "")


def recorded(version: str) -> dict[str, Any]:
    """Return the parameters of all seams in a recorded release."""
    found: dict[str, Any] = json.loads(RECORD.read_text())[version]
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_the_table_is_that_of_the_recorded_releases(seam: Seam, version: str) -> None:
    has = recorded(version)[seam.name]
    count = len(seam.parameters)
    if seam.way == "replaced":
        assert list(seam.parameters) == has[:count]
        assert set(has[count:]) <= set(seam.some)
    else:
        assert set(seam.parameters) <= set(has)


@pytest.mark.parametrize("seam", [seam for seam in SEAMS if seam.some], ids=lambda seam: seam.name)
def test_what_some_releases_have_is_in_some_of_the_record(seam: Seam) -> None:
    for name in seam.some:
        assert 0 < sum(name in recorded(version)[seam.name] for version in VERSIONS) < len(VERSIONS), name


@pytest.mark.skipif(not CHECKOUT, reason="UNICRON_MEGATRON_LM names no checkout")
@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_the_record_is_that_of_the_checkout(seam: Seam) -> None:
    checkout = Path(CHECKOUT)
    assert parameters(seam, checkout) == recorded(core_of([checkout]))[seam.name]


@pytest.fixture(params=VERSIONS)
def moved(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> types.ModuleType:
    """Put modules with the recorded seams of a release in Megatron-LM's place; give that of the training loop."""
    for seam in SEAMS:
        module = sys.modules.get(seam.module)
        if module is None or not hasattr(module, "is_stand_in"):
            module = types.ModuleType(seam.module)
            module.is_stand_in = True  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, seam.module, module)
        owner: Any = module
        names = recorded(request.param)[seam.name]
        *path, name = (seam.renamed if seam.renamed and not names else seam.name).split(".")
        for part in path:
            setattr(owner, part, getattr(owner, part, None) or SimpleNamespace())
            owner = getattr(owner, part)
        rest = {"args": "*args", "kwargs": "**kwargs"} if names == ["args", "kwargs"] else {}
        text = ", ".join(rest.get(one, one) for one in names)
        setattr(owner, name, eval(f"lambda {text}: None"))
    for package in ("megatron", "megatron.training"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    sys.modules["megatron.training"].training = sys.modules[seams.TRAINING]  # type: ignore[attr-defined]
    return sys.modules[seams.TRAINING]


def test_a_release_whose_seams_are_the_recorded_ones_is_accepted(moved: types.ModuleType) -> None:
    seams.check()


def test_a_seam_that_is_gone_or_has_moved_is_refused_by_its_name(moved: Any) -> None:
    del moved.evaluate_and_print_results
    moved.train_step = lambda forward_step_func, data_iterator: None
    moved.setup_model_and_optimizer = lambda model: None
    with pytest.raises(SeamDiffers, match="train_step: has the parameters") as raised:
        seams.check()
    assert set(raised.value.seams) == {"train_step", "evaluate_and_print_results", "setup_model_and_optimizer"}


def test_a_step_with_a_parameter_that_no_release_has_is_refused(moved: Any) -> None:
    step = ", ".join((*seams.BY_NAME["train_step"].parameters, "skips"))
    moved.train_step = eval(f"lambda {step}: None")
    with pytest.raises(SeamDiffers, match="train_step: has the parameters"):
        seams.check()


def test_a_function_is_called_with_those_of_the_values_that_it_has_parameters_for() -> None:
    def function(model_type: int, cfg_container: Any = None) -> tuple[int, Any]:
        return model_type, cfg_container

    assert seams.call(function, model_type=1, store=2) == (1, None)


def arguments(**fields: Any) -> SimpleNamespace:
    """Return Megatron-LM's arguments with which a task is healed, but for ``fields``."""
    plain = {refused.name: refused.allowed[0] for refused in settings.REFUSED}
    more = {
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "pipeline_model_parallel_size": 1,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        "rampup_batch_size": None,
        "load": None,
        "save": None,
        "finetune": False,
        "no_load_optim": False,
    }
    return SimpleNamespace(**plain | more | fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_experts", 8), ("context_parallel_size", 2), ("data_sharding", False), ("dataloader_type", "external"),
     ("rampup_batch_size", ["1", "1", "8"]), ("fp8", "hybrid"), ("exp_avg_dtype", "fp8"), ("use_torch_fsdp2", True),
     ("global_batch_size", None), ("data_parallel_random_init", True), ("qk_clip", True),
     ("eval_global_batch_size", 16)],
)  # fmt: skip
def test_what_cannot_be_healed_is_refused_by_its_name(name: str, value: Any) -> None:
    settings.check(arguments())
    with pytest.raises(InvalidSpec, match=f"--{name.replace('_', '-')}: ") as refused:
        settings.check(arguments(**{name: value}))
    assert isinstance(refused.value, NotHealed) == (name != "rampup_batch_size"), (
        "Megatron-LM takes no such batch either"
    )


@pytest.mark.parametrize("ramp", [(4, 0, 20), (0, 4, 20), (2, 4, 20), (16, 4, 20), (4, 4, -1)])
def test_a_batch_that_cannot_grow_as_it_is_to_is_refused(ramp: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidSpec, match=f"--rampup-batch-size: {' '.join(map(str, ramp))}: "):
        settings.check(arguments(rampup_batch_size=[*map(str, ramp)]))


def test_phases_are_refused_where_stock_cannot_tell_how_long_the_last_one_is() -> None:
    settings.check(arguments(phase_transition_iterations="3", train_samples=32))
    with pytest.raises(InvalidSpec, match=r"--phase-transition-iterations: .*--train-samples"):
        settings.check(arguments(phase_transition_iterations="3", train_samples=None))


@pytest.mark.usefixtures("megatron")
def test_a_batch_that_grows_is_refused_where_stock_does_not_let_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import num_microbatches_calculator as calculators

    growing = arguments(rampup_batch_size=["4", "4", "20"])
    monkeypatch.setattr(calculators, "RampupBatchsizeNumMicroBatchesCalculator", object, raising=False)
    settings.check(growing)
    monkeypatch.delattr(calculators, "RampupBatchsizeNumMicroBatchesCalculator")
    with pytest.raises(NotHealed, match="--rampup-batch-size: Megatron-LM from core"):
        settings.check(growing)


@pytest.mark.parametrize("name", ["finetune", "no_load_optim"])
def test_a_task_does_not_read_its_own_checkpoint_as_a_beginning(name: str) -> None:
    settings.check(arguments(load="/a", save="/b", **{name: True}))
    with pytest.raises(InvalidSpec, match=f"--{name.replace('_', '-')}: ") as refused:
        settings.check(arguments(load="/a", save="/a", **{name: True}))
    assert not isinstance(refused.value, NotHealed), "a whole restart would do the same"


def test_samples_are_those_of_the_stock_sampler_with_any_number_of_replicas() -> None:
    size, micro_batches, consumed = 2, 12, 24
    for replicas in (1, 2, 3, 4):
        for rank in range(replicas):
            # MegatronPretrainingSampler: of each chunk of replicas x size samples, rank r has the r-th part.
            stock = [
                list(range(first + rank * size, first + (rank + 1) * size))
                for first in range(consumed, consumed + micro_batches * size, replicas * size)
            ]
            assert [sample_ids(consumed, k, size) for k in range(rank, micro_batches, replicas)] == stock
