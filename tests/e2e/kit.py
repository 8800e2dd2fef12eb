"""What the end-to-end tests share: a client, a small task, waiting for conditions."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]


def small_task(name: str, data: Path, **changes: Any) -> Record:
    """Return a task of tiny steps."""
    return {
        "name": name,
        "model": {"layers": 2, "hidden": 32, "heads": 4, "sequence_length": 32},
        "batch": {"global": 12, "micro": 1},
        "steps": 80,
        "data": str(data),
        "workers": {"min": 1, "max": 4},
        "checkpoint": {"every": 20},
        "env": {"UNICRON_FAULT_SIGNALS": "1"},
        **changes,
    }


class Client:
    """The REST API as a test uses it."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def submit(self, spec: Record) -> Record:
        """Submit a task that must be taken."""
        answer = self.http.post("/v1/tasks", json=spec)
        assert answer.status_code == 201, answer.text
        record: Record = answer.json()
        return record

    def task(self, name: str) -> Record:
        """Return the task."""
        record: Record = self.http.get(f"/v1/tasks/{name}").raise_for_status().json()
        return record

    def items(self, path: str) -> list[Record]:
        """Return a list of the API."""
        items: list[Record] = self.http.get(path, params={"limit": 1000}).raise_for_status().json()["items"]
        return items

    def incidents(self, task: str) -> list[Record]:
        """Return the incidents of a task, oldest first."""
        return [i for i in self.items("/v1/incidents") if i["task"] == task]

    def until(self, what: str, holds: Callable[[], Any], limit_s: float = 60.0) -> Any:
        """Wait until ``holds`` is true; return its value."""
        deadline = time.monotonic() + limit_s
        while True:
            value = holds()
            if value:
                return value
            if time.monotonic() > deadline:
                state = [
                    {k: t[k] for k in ("name", "state", "reason", "step", "workers")} for t in self.items("/v1/tasks")
                ]
                incidents = [(i["kind"], i["severity"], i["restored_at"]) for i in self.items("/v1/incidents")]
                raise AssertionError(f"waited {limit_s} s in vain: {what}; tasks {state}; incidents {incidents}")
            time.sleep(0.05)

    def until_step(self, name: str, step: int, limit_s: float = 60.0) -> Record:
        """Wait until the task has done ``step`` steps."""

        def reached() -> Record | None:
            task = self.task(name)
            assert task["state"] != "failed", task
            return task if task["step"] >= step else None

        record: Record = self.until(f"{name} reaches step {step}", reached, limit_s)
        return record

    def until_state(self, name: str, state: str, limit_s: float = 120.0) -> Record:
        """Wait until the task is in ``state``."""

        def reached() -> Record | None:
            task = self.task(name)
            return task if task["state"] == state else None

        record: Record = self.until(f"{name} is {state}", reached, limit_s)
        return record

    def until_restored(self, kind: str, *, limit_s: float = 60.0, **where: str) -> Record:
        """Wait until the newest incident of this kind, with these fields, is over."""

        def restored() -> Record | None:
            found = [i for i in self.items("/v1/incidents") if i["kind"] == kind and where.items() <= i.items()]
            return found[-1] if found and found[-1]["restored_at"] else None

        record: Record = self.until(f"{kind} is restored", restored, limit_s)
        return record


def seconds(record: Record, start: str, end: str) -> float:
    """Return the time between two fields."""
    return (datetime.fromisoformat(record[end]) - datetime.fromisoformat(record[start])).total_seconds()


def at(record: Record, name: str) -> float:
    """Return a field's time as Unix seconds."""
    return datetime.fromisoformat(record[name]).timestamp()


DETERMINING = ("model", "batch", "steps", "data", "seed", "dropout", "optimizer", "exact")
"""Fields of a specification that the result depends on."""

_references: dict[str, tuple[Path, str]] = {}


def reference(spec: Record, directory: Path) -> tuple[Path, str]:
    """Train a specification alone, without failures; return its parameters' file and its samples' digest.

    Specifications that differ in nothing the result depends on are trained once.
    """
    alike = json.dumps({field: spec[field] for field in DETERMINING if field in spec}, sort_keys=True)
    if alike not in _references:
        directory.mkdir(parents=True)
        path = directory / "spec.json"
        path.write_text(json.dumps(spec))
        subprocess.run(
            [sys.executable, "-P", "-m", "unicron.train", "--spec", str(path), "--directory", str(directory)],
            check=True,
            timeout=120,
            cwd=directory,
            stdout=subprocess.DEVNULL,
        )
        summary = json.loads((directory / "result" / "summary.json").read_text())
        _references[alike] = directory / "result" / "parameters.safetensors", summary["samples_sha256"]
    return _references[alike]


def processes_of(run_dir: Path) -> list[int]:
    """Return the pids of all processes that belong to a run directory."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if process.environ().get("UNICRON_RUN_DIR", "").startswith(str(run_dir)):
                found.append(process.pid)
    return found
