"""What of a configuration of megatron-bridge's is refused, switched off, or told to the planner."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.launch.check import FIELDS
from shared.tasks.specification import parse_spec
from unicron.bridge import fields, settings
from unicron.errors import InvalidSpec, NotHealed


def configuration(**given: Any) -> SimpleNamespace:
    """Return a configuration with which a task is healed, but for what is given (``train__skip_train=True``)."""
    plain: dict[str, dict[str, Any]] = {
        "train": {
            "micro_batch_size": 2, "global_batch_size": 8, "rampup_batch_size": None, "train_iters": 20,
            "eval_interval": None, "eval_iters": 3,
        },
        "model": {
            "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 100,
            "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": None, "sequence_parallel": True, "attention_dropout": 0.0,
            "hidden_dropout": 0.1, "tp_comm_overlap": False, "pre_wrap_hook": None, "post_wrap_hook": None,
        },
        "checkpoint": {
            "save": "/a", "save_interval": 5, "load": None, "finetune": False, "load_optim": True, "async_save": False,
            "ckpt_format": "torch_dist",
        },
        "dataset": {"dataloader_type": "single", "data_sharding": True},
        "optimizer": {"use_distributed_optimizer": True},
        "ddp": {"overlap_grad_reduce": False},
        "dist": {"use_gloo_process_groups": True},
        "rng": {"seed": 7},
        "tokenizer": {},
        "logger": {},
    }  # fmt: skip
    made = SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in plain.items()})
    for path, value in given.items():
        *above, name = path.split("__")
        setattr(functools.reduce(getattr, above, made), name, value)
    return made


@pytest.mark.parametrize(
    ("path", "value"),
    [("train__iterations_to_skip", [3]), ("dataset__dataloader_type", "batch"), ("dataset__dataloader_type", None),
     ("peft", object()), ("dist__use_megatron_fsdp", True), ("checkpoint__ckpt_format", "zarr"),
     ("train__global_batch_size", None), ("train__rampup_batch_size", [1, 1, 8]),
     ("train__rampup_batch_size", [4, 3, 8]), ("model__pre_wrap_hook", print)],
)  # fmt: skip
def test_what_cannot_be_healed_is_refused_by_its_name(path: str, value: Any) -> None:
    settings.prepare(configuration())
    name = "train.global_batch_size" if value == [1, 1, 8] else path.replace("__", ".")
    with pytest.raises(InvalidSpec, match=rf"^{name}: ") as refused:
        settings.prepare(configuration(**{path: value}))
    assert isinstance(refused.value, NotHealed) == ("rampup" not in path), "megatron-bridge takes no such batch either"


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [("model__num_moe_experts", 8, "model.num_moe_experts: 8"), ("model__fp8", "e4m3", "model.fp8: 'e4m3'"),
     ("optimizer__optimizer_cpu_offload", True, "optimizer.optimizer_cpu_offload: True")],
)  # fmt: skip
def test_what_no_model_is_healed_with_is_refused_before_it_is_built(path: str, value: Any, name: str) -> None:
    settings.prepare(configuration(model__cuda_graph_impl="local"))
    with pytest.raises(NotHealed, match=rf"^{name} .*loop: restart"):
        settings.prepare(configuration(**{path: value}))


@pytest.mark.parametrize(("name", "value"), [("finetune", True), ("load_optim", False)])
def test_a_task_does_not_read_its_own_checkpoint_as_a_beginning(name: str, value: bool) -> None:
    settings.prepare(configuration(checkpoint__load="/b", **{f"checkpoint__{name}": value}))
    asks = configuration(checkpoint__load="/a", **{f"checkpoint__{name}": value})
    with pytest.raises(InvalidSpec, match=f"checkpoint.{name}: ") as refused:
        settings.prepare(asks)
    assert not isinstance(refused.value, NotHealed), "a whole restart would do the same"
    assert [(one.name, one.what) for one in settings.findings(asks)] == [(f"checkpoint.{name}", "refused")]


def test_what_only_concerns_speed_is_off_and_said(capfd: pytest.CaptureFixture[str]) -> None:
    config = configuration(
        model__tp_comm_overlap=True, checkpoint__async_save=True, ft=object(), train__exit_signal_handler=True
    )
    settings.prepare(config)
    assert (config.model.tp_comm_overlap, config.checkpoint.async_save, config.ft) == (False, False, None)
    assert not config.dist.use_gloo_process_groups
    assert config.train.exit_signal_handler
    said = capfd.readouterr().err
    assert [line.split()[1] for line in said.splitlines()] == ["model.tp_comm_overlap", "checkpoint.async_save", "ft"]


def test_the_planner_is_told_what_it_needs() -> None:
    found = fields.fields(configuration())
    assert set(FIELDS) <= set(found)
    spec = parse_spec(found | {"name": "a", "script": "/a.py", "data": "/a.py", "loop": "megatron-bridge"})
    assert (spec.steps, spec.batch.micro_batches, spec.tensor, spec.workers.min, spec.checkpoint.every) == (
        20,
        4,
        2,
        2,
        5,
    )
    assert spec.parallel.sequence_parallel
    assert json.loads(json.dumps(found)) == found


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have megatron-bridge leave a configuration as it is."""
    module: Any = types.ModuleType("megatron.bridge.training.config")
    module.runtime_config_update = lambda config: None
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_a_setting_that_is_refused_writes_no_fields(tmp_path: Path, unchecked: None) -> None:
    path = tmp_path / "task.yaml"
    with pytest.raises(InvalidSpec, match=r"^peft: "):
        fields.writing(path)(configuration(peft=object()), None)
    assert not path.exists()
    with pytest.raises(SystemExit):
        fields.writing(path)(configuration(), None)
    assert json.loads(path.read_text())["steps"] == 20


def answered(path: Path, script: Callable[[], None]) -> dict[str, Any]:
    """Return what is written of a script that is asked for its settings."""
    with contextlib.suppress(SystemExit, ValueError), fields.answering(path):
        script()
    answer: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return answer


def test_a_script_that_is_asked_says_its_fields_and_every_setting_that_matters(tmp_path: Path, unchecked: None) -> None:
    path = tmp_path / "answer"
    pretrain = fields.writing(path, findings=True)
    config = configuration(peft=object(), checkpoint__async_save=True, model__fp8="e4m3")
    found = answered(path, lambda: pretrain(config, print, [print]))
    assert found["task"] == fields.fields(config)
    assert {setting["argument"]: (setting["value"], setting["what"]) for setting in found["settings"]} == {
        "pretrain(callbacks=...)": ("[<built-in function print>]", "restart"), "peft": ("object", "restart"),
        "checkpoint.async_save": (True, "speed-off"), "model.fp8": ("e4m3", "restart"),
    }  # fmt: skip
    assert all(setting["why"] and setting["instead"] for setting in found["settings"])
    without = answered(path, lambda: pretrain(configuration(train__global_batch_size=None)))
    assert (without["task"], len(without["settings"])) == (None, 1)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (lambda: None, "it ends without calling pretrain()"),
        (
            lambda: int("x\ny"),
            "it ends with ValueError: invalid literal for int() with base 10: 'x\\ny' before pretrain()",
        ),
        (lambda: sys.exit(2), "it ends with SystemExit: 2 before pretrain()"),
    ],
)
def test_a_script_that_does_not_come_to_its_pretrain_says_why(script: Any, problem: str, tmp_path: Path) -> None:
    assert answered(tmp_path / "answer", script) == {"problem": problem}
