"""What the end-to-end tests share: a client, a small task, a pace for it, waiting for conditions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from cli.demo.report import TOLERANCE, compare_parameters
from tests.condition import until_blocking

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]


def small_task(name: str, data: Path, **changes: Any) -> Record:
    """Return a task of tiny steps."""
    return {
        "name": name,
        "model": {"layers": 2, "hidden": 32, "heads": 4, "sequence_length": 32},
        "batch": {"global": 8, "micro": 1},
        "steps": 40,
        "data": str(data),
        "workers": {"min": 1, "max": 4},
        "checkpoint": {"every": 20},
        # Its result is compared with that of a run without failures.
        "deterministic_sums": True,
        "env": {"UNICRON_FAULT_SIGNALS": "1"},
        **changes,
    }


def make_corpus(folder: Path) -> Path:
    """Generate a text of about 1 MB; return its path."""
    path = folder / "corpus.txt"
    subprocess.run(
        [sys.executable, "-P", "-m", "unicron.trainer.corpus", str(path), "--seed", "1"], check=True, timeout=60
    )
    return path


PACED = """
import json, os, pathlib, time
from unicron import train
from unicron.trainer.data import Samples

read, pace = Samples.batch, pathlib.Path(os.environ["PACE"])
spec = json.loads(pathlib.Path(os.environ["UNICRON_SPEC"]).read_text())
samples_of_task = spec["steps"] * spec["batch"]["global"]

def slowly(samples, ids):
    if pace.exists():
        time.sleep(float(os.environ["PACE_S"]) * (1.0 + 3.0 * (ids[0] / samples_of_task) ** 2))
    return read(samples, ids)

Samples.batch = slowly
train.train(pathlib.Path(os.environ["UNICRON_SPEC"]))
"""
"""The built-in trainer, with a data loader that is slow as long as a file exists.

It becomes up to four times as slow, so that the steps that are left last longer than any stall of the test. At any time
it is less than three times (``hang_factor``) as slow as on average before, so that no step counts as a hang.
"""


class Pace:
    """Keeps a task from its end until a test has done what it does to a running task, without loading a core.

    Args:
        folder: for the script and the file that makes the data loader slow.
        batch_s: seconds that the data loader waits before each micro-batch, at first.
        script: what to run; it finds the file's path in ``PACE`` and the seconds in ``PACE_S``.
    """

    def __init__(self, folder: Path, batch_s: float, script: str = PACED) -> None:
        self._batch_s = batch_s
        self._file = folder / "pace"
        self._file.touch()
        self._script = folder / "paced.py"
        self._script.write_text(script)

    def of(self, spec: Record) -> Record:
        """Return the specification, with this pace."""
        env = {**spec["env"], "PACE": str(self._file), "PACE_S": str(self._batch_s)}
        return spec | {"script": str(self._script), "env": env}

    def end(self) -> None:
        """Let the task go on as fast as it can."""
        self._file.unlink()


class Client:
    """The REST API as a test uses it.

    Args:
        url: of the API.
        transport: how it is reached, where that is not the machine's own network.
    """

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        self.http = httpx.Client(base_url=url, timeout=40.0, transport=transport)

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
        """Return a whole list of the API."""
        items: list[Record] = []
        further: dict[str, str] = {}
        while True:
            page = self.http.get(path, params={"limit": "1000", **further}).raise_for_status().json()
            items += page["items"]
            if page["next_cursor"] is None:
                return items
            further = {"cursor": page["next_cursor"]}

    def incidents(self, task: str) -> list[Record]:
        """Return the incidents of a task, oldest first."""
        return [i for i in self.items("/v1/incidents") if i["task"] == task]

    def until(self, what: str, holds: Callable[[], Any], limit_s: float = 60.0) -> Any:
        """Wait until ``holds`` is true; return its value."""

        def seen() -> str:
            shown = ("name", "state", "reason", "step", "workers")
            tasks = [{k: t[k] for k in shown} for t in self.items("/v1/tasks")]
            incidents = [(i["kind"], i["severity"], i["restored_at"]) for i in self.items("/v1/incidents")]
            return f"tasks {tasks}; incidents {incidents}"

        return until_blocking(holds, what, limit_s=limit_s, seen=seen)

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


DETERMINING = ("model", "batch", "steps", "data", "seed", "dropout", "optimizer", "exact", "deterministic_sums")
"""Fields of a specification that the result depends on."""

_references: dict[str, tuple[Path, str]] = {}


def reference(spec: Record, directory: Path, *, timeout_s: float = 120.0) -> tuple[Path, str]:
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
            timeout=timeout_s,
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


def check_result(client: Client, name: str, spec: dict[str, object], tmp_path: Path) -> None:
    """The finished task has the parameters and samples of a run without failures."""
    task = client.task(name)
    parameters, samples = reference(spec, tmp_path / f"reference-{name}")
    assert task["result"]["steps"] == spec["steps"]
    assert task["result"]["samples_sha256"] == samples
    assert compare_parameters(Path(task["result"]["parameters_path"]), parameters) <= TOLERANCE


def rank(task: Record, number: int) -> Record:
    """Return what a task shows of one rank."""
    return next(r for r in task["ranks"] if r["rank"] == number)


def pids(task: Record) -> dict[str, int]:
    """Return the process of each worker."""
    return {r["worker"]: r["pid"] for r in task["ranks"]}
