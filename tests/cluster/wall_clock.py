"""A wall clock for single processes: libfaketime shifts what they read, and the machine's clock stays as it is.

A process reads the shift from a file every second, so the test can step the clock while the process runs.
The monotonic clock is not shifted: a step of a real wall clock does not move it either.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

READ_EVERY_S = 1
"""Pause between two looks at the file. A look at each reading of the clock would make that 30 times as slow."""


def find_library() -> Path | None:
    """Return libfaketime: Debian's, or that of the wheel of this name."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    # Found, not imported: its import is for processes that shift their own clock.
    wheel = importlib.util.find_spec("libfaketime")
    if wheel is not None and wheel.submodule_search_locations:
        found.append(Path(wheel.submodule_search_locations[0]) / "vendor" / "libfaketime" / "src" / "libfaketime.so.1")
    return next((path for path in found if path.exists()), None)


class WallClock:
    """The wall clock of some processes, right at first.

    Args:
        path: of a file that this makes; the processes read it.
    """

    def __init__(self, path: Path) -> None:
        library = find_library()
        assert library is not None, "requirements.missing() looks for it"
        self._path, self._library = path, library
        self.step(0)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of a process that has this clock; its children have it too."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_CACHE_DURATION": str(READ_EVERY_S),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def step(self, offset_s: int) -> None:
        """Let the clock differ from the machine's by so many seconds from now on."""
        new = self._path.with_suffix(".new")
        new.write_text(f"{offset_s:+d}s\n")
        new.rename(self._path)  # a process never reads half of a line
