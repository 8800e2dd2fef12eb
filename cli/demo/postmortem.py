"""The demo's post-mortems, written into the run folder while the stack still answers: the API makes them."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from cli.demo.straggler import Straggler
from cli.options import connected
from cli.waiting import Record

FOLDER = "postmortem"
"""Folder of the pages, below the run folder."""


def write_pages(server: str, incidents: list[Record], stragglers: list[Straggler], run_dir: Path) -> list[Path]:
    """Write the post-mortem of each incident and slow worker as HTML; return the files, in this order.

    Args:
        server: address of the API, which makes the pages.
        incidents: as the API lists them.
        stragglers: the slow workers that were found.
        run_dir: the demo's folder.
    """
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    pages = [(incident["kind"], f"/v1/incidents/{quote(incident['id'], safe='')}") for incident in incidents]
    pages += [("slow-worker", f"/v1/slow-workers/{quote(straggler.id, safe='')}") for straggler in stragglers]
    files = []
    with connected(server) as client:
        for number, (name, path) in enumerate(pages, start=1):
            file = folder / f"{number}-{name}.html"
            file.write_text(client.text(f"{path}/postmortem", {"format": "html"}), encoding="utf-8")
            files.append(file)
    return files


def shown(path: Path) -> str:
    """Return a path as it can be typed: relative to the working directory where it lies below it."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
