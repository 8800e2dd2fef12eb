"""The demo's post-mortems: the page of each incident, written into the run folder while the stack still answers."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from cli.client import Client
from cli.waiting import Record

FOLDER = "postmortem"
"""Folder of the pages, below the run folder."""


def write_pages(server: str, incidents: list[Record], run_dir: Path) -> list[Path]:
    """Write the post-mortem of each incident as an HTML file; return the files, in the order of the incidents.

    Args:
        server: address of the API, which makes the pages.
        incidents: as the API lists them.
        run_dir: the demo's folder.
    """
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    files = []
    with Client(server) as client:
        for number, incident in enumerate(incidents, start=1):
            path = f"/v1/incidents/{quote(incident['id'], safe='')}/postmortem"
            file = folder / f"{number}-{incident['kind']}.html"
            file.write_text(client.text(path, {"format": "html"}), encoding="utf-8")
            files.append(file)
    return files


def shown(path: Path) -> str:
    """Return a path as it can be typed: relative to the working directory where it lies below it."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
