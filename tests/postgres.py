"""Where a PostgreSQL server for tests is."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

PROGRAMS = ("postgres", "initdb", "psql")


def find_binaries() -> Path | None:
    """Return the folder of a PostgreSQL server's programs: on PATH, the newest of Debian's, or the wheel pgserver's."""
    found = [Path(path).resolve().parent for path in [shutil.which("postgres")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    # Found, not imported: the import makes folders for servers of its own.
    wheel = importlib.util.find_spec("pgserver")
    if wheel is not None and wheel.submodule_search_locations:
        found.append(Path(wheel.submodule_search_locations[0]) / "pginstall" / "bin")
    return next((path for path in found if all((path / name).exists() for name in PROGRAMS)), None)
