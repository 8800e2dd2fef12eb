"""Which checkpoint ``checkpoint.load`` and ``checkpoint.pretrained_checkpoint`` mean."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unicron.bridge.loading import Loading
from unicron.errors import InvalidSpec
from unicron.megatron_lm.loading import Begun

TRACKER, STATE = "latest_checkpointed_iteration.txt", "latest_train_state.pt"


def loading(load_checkpoint: Any = None, **given: Any) -> Loading:
    """Return what reads a checkpoint with some settings, and with a stand-in of megatron-bridge's reader."""

    def read_train_state() -> None: ...

    read_train_state.cache_clear = lambda: None  # type: ignore[attr-defined]
    checkpointing = SimpleNamespace(
        checkpoint_exists=lambda folder: folder is not None and any(Path(folder).glob("latest_*")),
        get_checkpoint_tracker_filename=lambda folder: str(Path(folder, TRACKER)),
        get_checkpoint_train_state_filename=lambda folder, prefix: str(Path(folder, f"{prefix}_train_state.pt")),
        load_checkpoint=load_checkpoint,
        read_train_state=read_train_state,
    )
    plain = {"load": None, "pretrained_checkpoint": None, "finetune": False, "ckpt_step": None}
    more = {"exit_on_missing_checkpoint": False}
    state = SimpleNamespace(cfg=SimpleNamespace(checkpoint=SimpleNamespace(**plain | more | given)))
    return Loading(checkpointing, state, steps=10)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder whose newest checkpoint is of iteration 4."""
    torch.save({"step": torch.tensor(4, dtype=torch.int32)}, tmp_path / STATE)
    (tmp_path / TRACKER).write_text("3")
    return str(tmp_path)


def test_the_step_is_that_of_the_checkpoint_that_megatron_bridge_would_read(folder: str) -> None:
    assert loading(load="/none").step() == loading(load="/none", pretrained_checkpoint="/none").step() == -1
    assert loading(load=folder).step() == 4
    assert loading(load=folder, ckpt_step=2).step() == 2
    assert loading(load=folder, finetune=True).step() == 0
    assert loading(load="/none", pretrained_checkpoint=folder).step() == 0
    assert str(loading(load="/none", pretrained_checkpoint=folder)) == f"checkpoint.pretrained_checkpoint {folder}"
    assert str(loading(load=folder, pretrained_checkpoint=folder)) == f"checkpoint.load {folder}"
    assert (loading(load=folder).is_needed, loading(load=folder, exit_on_missing_checkpoint=True).is_needed) == (
        False,
        True,
    )


def test_a_checkpoint_of_megatron_lm_is_named_by_its_tracker(folder: str) -> None:
    Path(folder, STATE).unlink()
    assert loading(load=folder).step() == 3
    Path(folder, TRACKER).write_text("release")
    assert loading(load=folder).step() == 0
    Path(folder, TRACKER).write_text("three")
    with pytest.raises(InvalidSpec, match=r"checkpoint\.load .*: the newest checkpoint is not named"):
        loading(load=folder).step()


def test_where_the_run_stood_is_what_the_checkpoint_says(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("megatron.bridge.training.state")
    module.TrainState = SimpleNamespace
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def reads(state: Any, model: Any, optimizer: Any, scheduler: Any) -> tuple[int, float]:
        state.train_state = SimpleNamespace(consumed_train_samples=48, consumed_valid_samples=24)
        state.cfg.checkpoint.finetune = True
        return 4, 1e9

    one, begun, model = loading(reads, load=folder), Begun(), torch.nn.Linear(1, 1)
    step = one.load(model, torch.optim.SGD(model.parameters()), {"scheduler": SimpleNamespace(made=0), "begun": begun})
    assert (step, begun.iteration, begun.train_samples, begun.valid_samples) == (4, 4, 48, 24)
    assert one.step() == 4  # a later checkpoint is the task's own
