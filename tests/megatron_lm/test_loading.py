"""Which checkpoint ``--load`` and ``--pretrained-checkpoint`` mean, and what becomes of errors as it is read."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unicron.errors import Interrupted, InvalidSpec
from unicron.megatron_lm.loading import Begun, Loading

NAME = "latest_checkpointed_iteration.txt"


def arguments(**given: Any) -> SimpleNamespace:
    """Return arguments of Megatron-LM's."""
    plain = {"load": None, "pretrained_checkpoint": None, "finetune": False, "ckpt_step": None, "eval_interval": 2}
    return SimpleNamespace(**plain | {"global_batch_size": 12, "eval_iters": 3} | given)


def loading(load_checkpoint: Any = None, args: Any = None, **given: Any) -> Loading:
    """Return what reads a checkpoint with some arguments, and with a stand-in of Megatron-LM's reader."""
    checkpointing = SimpleNamespace(
        checkpoint_exists=lambda folder: folder is not None and Path(folder, NAME).is_file(),
        get_checkpoint_tracker_filename=lambda folder: str(Path(folder, NAME)),
        load_checkpoint=load_checkpoint,
    )
    return Loading(checkpointing, open, args or arguments(**given), steps=10)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder whose newest checkpoint is of iteration 4."""
    (tmp_path / NAME).write_text("4\n")
    return str(tmp_path)


def test_the_step_is_that_of_the_checkpoint_that_megatron_lm_would_read(folder: str) -> None:
    assert loading(load="/none").step() == loading(load="/none", pretrained_checkpoint="/none").step() == -1
    assert loading(load=folder).step() == 4
    assert loading(load=folder, ckpt_step=2).step() == loading(load="/none", ckpt_step=2).step() == 2
    assert loading(load=folder, finetune=True).step() == 0
    assert loading(load="/none", ckpt_step=2, finetune=True).step() == 0
    assert loading(load="/none", pretrained_checkpoint=folder).step() == 0
    assert loading(load="/none", pretrained_checkpoint=folder, ckpt_step=2).step() == 0
    assert loading(load="/none", pretrained_checkpoint="/none", ckpt_step=2).step() == -1
    assert str(loading(load="/none", pretrained_checkpoint=folder)) == f"--pretrained-checkpoint {folder}"
    assert loading(load=folder, pretrained_checkpoint="/none").step() == 4
    Path(folder, NAME).write_text("release")
    assert loading(load=folder).step() == 0
    Path(folder, NAME).write_text("four")
    with pytest.raises(InvalidSpec, match="has 'four', not an iteration"):
        loading(load=folder).step()


def load(one: Loading, optimizer: Any = None) -> tuple[int, Begun]:
    """Load a checkpoint into a small model."""
    model = torch.nn.Linear(1, 1)
    begun = Begun()
    optimizer = (optimizer or torch.optim.SGD)(model.parameters(), lr=0.1)
    return one.load(model, optimizer, {"scheduler": SimpleNamespace(made=None), "begun": begun}), begun


@pytest.mark.parametrize(("consumed", "expected"), [(40, 40), (0, 48)])
def test_where_the_run_stood_is_what_the_checkpoint_says_or_what_stock_reckons(
    folder: str, consumed: int, expected: int
) -> None:
    def reads(model: Any, optimizer: Any, scheduler: Any) -> tuple[int, float]:
        args.consumed_train_samples, args.finetune = consumed, True
        return 4, 1e9

    args = arguments(load=folder)
    step, begun = load(loading(reads, args))
    assert (step, begun.iteration, begun.train_samples, begun.valid_samples) == (4, 4, expected, 72)
    assert not args.finetune  # a later checkpoint is the task's own


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (AssertionError("tensor sizes"), "--load .*: tensor sizes"),
        (SystemExit(), "--load .*: Megatron-LM cannot read it"),
    ],
)
def test_a_checkpoint_that_megatron_lm_refuses_is_refused_by_name(
    folder: str, error: BaseException, raised: str
) -> None:
    def refuses(*args: Any) -> None:
        raise error

    with pytest.raises(InvalidSpec, match=raised):
        load(loading(refuses, load=folder))


@pytest.mark.parametrize("error", [Interrupted("held"), RuntimeError("gloo: Connection closed by peer")])
def test_a_fault_as_it_is_read_is_a_fault(folder: str, error: Exception) -> None:
    def breaks(*args: Any) -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        load(loading(breaks, load=folder))


def test_a_checkpoint_behind_the_last_step_is_refused(folder: str) -> None:
    with pytest.raises(InvalidSpec, match="it is of iteration 11, and the training has 10"):
        load(loading(lambda *args: (11, 0.0), load=folder, consumed_train_samples=0))


@pytest.mark.parametrize(("counted", "scale", "refused"), [(4, None, False), (3, None, True), (3, 8.0, False)])
def test_an_optimizer_that_has_counted_other_updates_is_refused_unless_a_loss_scale_has_skipped_some(
    counted: int, scale: float | None, refused: bool, folder: str
) -> None:
    class Fused(torch.optim.SGD):
        """Counts for a whole group, as Apex's and Transformer Engine's do; has a loss scale as Megatron's have."""

        grad_scaler = None if scale is None else SimpleNamespace(scale=scale)

    def reads(model: Any, optimizer: Any, scheduler: Any) -> tuple[int, float]:
        optimizer.param_groups[0]["step"] = counted
        return 4, 0.0

    with pytest.raises(InvalidSpec, match="the optimizer has counted 3 of 4 updates") if refused else nullcontext():
        assert load(loading(reads, load=folder), Fused)[0] == 4
