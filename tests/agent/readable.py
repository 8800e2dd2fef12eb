"""Runs a program where every user can read this Python and this project.

    python tests/agent/readable.py PROGRAM ...

Both may lie in the home folder of root, which nobody else can enter. In a mount namespace of its own the program sees a
folder there that has the two and nothing else, and that everybody can enter. Needs root.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WRAPPER = ("unshare", "--mount", "--propagation", "private", sys.executable, "-P", __file__)
"""The beginning of a command line; the program's follows."""


def closed_folders() -> dict[Path, list[Path]]:
    """Return the outermost folders that other users cannot enter -> what has to be readable in them."""
    found: dict[Path, list[Path]] = {}
    for needed in sorted({Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT}):
        for folder in reversed(needed.parents):
            if not folder.stat().st_mode & 0o001:
                found.setdefault(folder, []).append(needed)
                break
    return found


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def open_up(folder: Path, needed: list[Path]) -> None:
    """Put an open folder, with what is needed at its place, over a closed one."""
    kept = tempfile.mkdtemp()
    mount("--rbind", str(folder), kept)
    mount("-t", "tmpfs", "-o", "mode=0755", "none", str(folder))
    for path in needed:
        path.mkdir(parents=True, exist_ok=True)
        mount("--rbind", str(Path(kept, path.relative_to(folder))), str(path))
    subprocess.run(["umount", "--lazy", kept], check=True)
    os.rmdir(kept)


if __name__ == "__main__":
    for folder, needed in closed_folders().items():
        open_up(folder, needed)
    os.execvp(sys.argv[1], sys.argv[1:])
