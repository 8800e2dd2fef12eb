"""The checkpoint that ``--load`` or ``--pretrained-checkpoint`` names, read by Megatron-LM's own ``load_checkpoint``.

The library asks for it where a task has no newer state of its own (``unicron.join.user_state``): at its start, and
after faults that have left neither a rank's state nor a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unicron.errors import InvalidSpec, UnicronError
from unicron.link import reporting
from unicron.megatron.grad_scaler import GradScaler
from unicron.megatron.model import model_chunks
from unicron.megatron.optimizer import group_counts, torch_optimizers


class Begun:
    """The beginning of a task, as a part of its state: what Megatron-LM had done up to the checkpoint it loads."""

    def __init__(self) -> None:
        """Begin with nothing done."""
        self.iteration = self.train_samples = self.valid_samples = 0
        self.operations = 0.0
        """Floating-point operations."""

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers as a state dict."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the numbers with which the task began."""
        vars(self).update(state)


class Loading:
    """The state that the arguments name, as ``attach(origin=...)`` takes it."""

    _owner = "Megatron-LM"
    """Whose functions read the checkpoint, for people."""

    def __init__(self, checkpointing: Any, open_file: Callable[..., Any], args: Any, steps: int) -> None:
        """Read nothing yet.

        Args:
            checkpointing: Megatron-LM's module of that name.
            open_file: Megatron-LM's function by which it opens the tracker; releases have it in different places.
            args: Megatron-LM's arguments.
            steps: the number of steps of the whole training.
        """
        self._checkpointing, self._open_file, self._args, self._steps = checkpointing, open_file, args, steps

    def __str__(self) -> str:
        """Return the argument that counts."""
        load, pretrained = self._args.load, self._args.pretrained_checkpoint
        if pretrained and not self._checkpointing.checkpoint_exists(load):
            return f"--pretrained-checkpoint {pretrained}"
        return f"--load {load}"

    @property
    def is_needed(self) -> bool:
        """Whether stock does not begin without it."""
        return bool(self._args.pretrained_checkpoint or self._args.exit_on_missing_checkpoint)

    def step(self) -> int:
        """Return the iteration of the checkpoint: 0 for parameters alone; -1: there is none.

        Stock looks for it in this order: if the folder of ``--load`` has no tracker, ``--pretrained-checkpoint``
        counts, whatever ``--ckpt-step`` says, and gives parameters alone.

        Raises:
            InvalidSpec: the tracker names neither an iteration nor a release.
        """
        args, checkpointing = self._args, self._checkpointing
        exists = checkpointing.checkpoint_exists
        if args.pretrained_checkpoint and not exists(args.load):
            return 0 if exists(args.pretrained_checkpoint) else -1
        text = str(args.ckpt_step or "")
        if exists(args.load):
            with self._open_file(checkpointing.get_checkpoint_tracker_filename(args.load), "r") as file:
                text = file.read().strip()
        elif not text:
            return -1
        if args.finetune or text == "release":
            return 0
        if not text.isdecimal():
            raise InvalidSpec(f"--load: {args.load}: latest_checkpointed_iteration.txt has {text!r}, not an iteration")
        return int(args.ckpt_step or text)

    def load(self, model: Any, optimizer: Any, objects: Mapping[str, Any]) -> int:
        """Load the checkpoint; return its iteration.

        Raises:
            InvalidSpec: Megatron-LM refuses the checkpoint for this model, optimizer or layout, or nothing is left to
                train.
            RuntimeError: a peer was lost.
        """
        args = self._args
        for one in torch_optimizers(optimizer):
            one.state.clear()  # Megatron-LM looks whether there is any
        finetune = args.finetune
        try:
            found, operations = self._read(model_chunks(model), optimizer, objects["scheduler"].made)
        except (Exception, SystemExit) as err:
            if isinstance(err, UnicronError) or reporting.is_communication(err):
                raise  # the generation is held, or a peer was lost
            raise InvalidSpec(f"{self}: {str(err) or f'{self._owner} cannot read it'}") from err
        finally:
            args.finetune = finetune  # which a pretrained checkpoint sets for good
        iteration = int(found)
        if iteration > self._steps:
            raise InvalidSpec(f"{self}: it is of iteration {iteration}, and the training has {self._steps}")
        _check_counts(optimizer, iteration, str(self))
        begun: Begun = objects["begun"]
        begun.iteration, begun.operations = iteration, float(operations if iteration else 0)
        begun.train_samples, begun.valid_samples = self._consumed(iteration)
        return iteration

    def _read(self, chunks: list[Any], optimizer: Any, scheduler: Any) -> tuple[int, float]:
        """Have the owner read the checkpoint; return its iteration and its floating-point operations."""
        self._args.consumed_train_samples = self._args.consumed_valid_samples = 0
        found: tuple[int, float] = self._checkpointing.load_checkpoint(chunks, optimizer, scheduler)
        return found

    def _consumed(self, iteration: int) -> tuple[int, int]:
        """Return the samples of training and validation that a checkpoint which was read has consumed.

        What old checkpoints do not say is reckoned as stock does.
        """
        args = self._args
        evaluated = iteration // args.eval_interval * args.eval_iters if args.eval_interval and args.eval_iters else 0
        return (
            args.consumed_train_samples or iteration * args.global_batch_size,
            args.consumed_valid_samples or evaluated * args.global_batch_size,
        )


def _check_counts(optimizer: Any, iteration: int, named: str) -> None:
    """Check that an optimizer that counts updates for a whole group has counted those of all iterations.

    With a loss scale some updates were skipped; the library keeps their number with the scale.

    Args:
        optimizer: Megatron's.
        iteration: of the checkpoint.
        named: the setting that names the checkpoint, with its value.

    Raises:
        InvalidSpec: the optimizer has not; a new process would go on with the number of iterations.
    """
    counts = group_counts(optimizer)
    skips = len(counts) == 1 and GradScaler(optimizer).applies
    if iteration and counts - {iteration} and not (skips and max(counts) < iteration):
        raise InvalidSpec(
            f"{named}: the optimizer has counted {', '.join(map(str, sorted(counts)))} of {iteration} updates (was its "
            "state loaded?), and a process that replaces a lost one would count all of them"
        )
