"""The checkpoint that ``checkpoint.load`` or ``checkpoint.pretrained_checkpoint`` names, read by megatron-bridge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unicron.errors import InvalidSpec
from unicron.megatron_lm import loading


class Loading(loading.Loading):
    """What the configuration names, as ``attach(origin=...)`` takes it."""

    _owner = "megatron-bridge"

    def __init__(self, checkpointing: Any, state: Any, steps: int) -> None:
        """Read nothing yet.

        Args:
            checkpointing: megatron-bridge's module of that name.
            state: its global state, with the configuration.
            steps: of the whole training.
        """
        super().__init__(checkpointing, open, state.cfg.checkpoint, steps)
        self._state = state

    def __str__(self) -> str:
        """Return the setting that counts."""
        load, pretrained = self._args.load, self._args.pretrained_checkpoint
        if pretrained and not self._checkpointing.checkpoint_exists(load):
            return f"checkpoint.pretrained_checkpoint {pretrained}"
        return f"checkpoint.load {load}"

    def step(self) -> int:
        """Return the iteration of the checkpoint: 0 for parameters alone; -1: there is none.

        Raises:
            InvalidSpec: the file that names the newest checkpoint cannot be read.
        """
        settings, exists = self._args, self._checkpointing.checkpoint_exists
        if not exists(settings.load):
            return 0 if settings.pretrained_checkpoint and exists(settings.pretrained_checkpoint) else -1
        if settings.finetune:
            return 0
        if settings.ckpt_step is not None:
            return int(settings.ckpt_step)
        # megatron-bridge's own reader sends what it reads to all ranks; here each reads by itself.
        newest = Path(self._checkpointing.get_checkpoint_train_state_filename(settings.load, prefix="latest"))
        tracker = Path(self._checkpointing.get_checkpoint_tracker_filename(settings.load))
        try:
            if newest.exists():
                return int(torch.load(newest, map_location="cpu", weights_only=True)["step"])
            text = tracker.read_text().strip()
            return 0 if text == "release" else int(text)
        except Exception as err:
            raise InvalidSpec(f"{self}: the newest checkpoint is not named: {type(err).__name__}: {err}") from err

    def _read(self, chunks: list[Any], optimizer: Any, scheduler: Any) -> tuple[int, float]:
        from megatron.bridge.training.state import TrainState

        self._state.train_state = TrainState()
        # It keeps what it has read, as an object that the training changes afterwards.
        self._checkpointing.read_train_state.cache_clear()
        found: tuple[int, float] = self._checkpointing.load_checkpoint(self._state, chunks, optimizer, scheduler)
        return found

    def _consumed(self, iteration: int) -> tuple[int, int]:
        state = self._state.train_state
        return int(state.consumed_train_samples), int(state.consumed_valid_samples)
