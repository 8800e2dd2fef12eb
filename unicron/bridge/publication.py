"""The files by which megatron-bridge names its newest checkpoint: only moved once that is complete, and at once.

megatron-bridge copies ``latest_train_state.pt`` and writes ``latest_checkpointed_iteration.txt`` before the checkpoint
has its configuration and its tokenizer; a process that is killed in between leaves names that say too much, or no
number. Here both are written aside while a checkpoint is saved, and renamed behind it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unicron.megatron_lm import tracker


class Publication:
    """Of one folder of checkpoints, by one process."""

    def __init__(self, checkpointing: Any) -> None:
        """Take the place of the functions that name the files; ``seams`` lists them.

        Args:
            checkpointing: megatron-bridge's module of that name.
        """
        self._folder: Path | None = None
        self._moves: dict[Path, Path] = {}
        """From a file aside to the one that it becomes, in the order of their renaming."""
        train_state_of = checkpointing.get_checkpoint_train_state_filename
        self.tracker_of = checkpointing.get_checkpoint_tracker_filename
        checkpointing.get_checkpoint_train_state_filename = self._aside(train_state_of, "latest")
        checkpointing.get_checkpoint_tracker_filename = self._aside(self.tracker_of)
        # It deletes old checkpoints, of which the files may still name one.
        stock = checkpointing.cleanup_old_non_persistent_checkpoint

        @functools.wraps(stock)
        def cleaned(*args: Any, **kwargs: Any) -> Any:
            self.publish()
            return stock(*args, **kwargs)

        checkpointing.cleanup_old_non_persistent_checkpoint = cleaned

    @contextlib.contextmanager
    def saving(self, folder: str) -> Iterator[None]:
        """Have the files written aside, and renamed at the end. ``folder``: of the checkpoint that is saved inside.

        Raises:
            DamagedCheckpoint: it is not complete; the files stay.
            OSError: they cannot be written.
        """
        self._folder, self._moves = Path(folder), {}
        try:
            yield
            self.publish()
        finally:
            self._folder, self._moves = None, {}

    def publish(self) -> None:
        """Have the files, if this rank has written them, name the checkpoint that is saved.

        Raises:
            DamagedCheckpoint: it is not complete; they stay.
            OSError: they cannot be written.
        """
        folder, moves = self._folder, self._moves
        self._folder, self._moves = None, {}
        if folder is None or not moves:
            return
        tracker.sync(folder)
        for aside, path in moves.items():
            tracker.sync_path(aside)
            os.replace(aside, path)
            tracker.sync_path(path.parent)

    def _aside(self, function: Callable[..., str], prefix: str | None = None) -> Callable[..., str]:
        """Return a function of megatron-bridge's that names a file; of a save that goes on, a file aside."""

        @functools.wraps(function)
        def named(checkpoints_path: str, *args: Any, **kwargs: Any) -> str:
            path = function(checkpoints_path, *args, **kwargs)
            given = args[0] if args else kwargs.get("prefix")
            if self._folder is None or given != prefix or Path(checkpoints_path) != self._folder.parent:
                return path
            place = Path(path)
            aside = place.with_name(f".{place.name}.{os.getpid()}")
            self._moves[aside] = place
            return str(aside)

        return named
