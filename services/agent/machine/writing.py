"""Whether a folder can be written to, as found by a small file."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def write_problem(folder: Path) -> str:
    """Return why a folder, which is made if need be, takes no file; empty if it does."""
    path = folder / f".unicron-write-test-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        path.unlink()
    except OSError as err:
        with contextlib.suppress(OSError):
            path.unlink()
        return f"{folder} cannot be written to: {err.strerror or err}"
    return ""
