"""An environment to train in, as a user has it: torch, megatron-core and the library, and no more of the project."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def make(folder: Path) -> str:
    """Make such an environment with the distributions that are installed here; return its Python.

    What a wheel of the library has is tested elsewhere (tests/packaging/test_build_context.py).
    """
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for installed in Path(sysconfig.get_paths()["purelib"]).iterdir():
        own = installed.name.startswith(("__editable__", "unicron"))
        if not own and installed.suffix != ".pth":
            (packages / installed.name).symlink_to(installed)
    (packages / "unicron").symlink_to(ROOT / "unicron")
    return str(folder / "bin" / "python")
