"""``unicron up`` on a machine with and without devices: pretended ones, so that ranks train on the CPU all the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.agent.recorded_nvml import COMPILER, RecordedNvml
from tests.e2e.by_hand import UNICRON, cli, stop
from tests.e2e.kit import Client, Record, processes_of, small_task

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    pytest.mark.skipif(COMPILER is None, reason="there is no C compiler for the stand-in library"),
]

SHOWS = """
import json, os, pathlib, torch
from unicron import train
rank = {"visible": os.environ["CUDA_VISIBLE_DEVICES"], "cuda": torch.cuda.is_available()}
pathlib.Path(os.environ["SHOWN"], os.environ["UNICRON_WORKER"].replace("/", "-")).write_text(json.dumps(rank))
train.train(pathlib.Path(os.environ["UNICRON_SPEC"]))
"""
"""The built-in trainer, whose ranks write down what they see of devices."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run directory, of which no process is left."""
    yield tmp_path / "run"
    for pid in processes_of(tmp_path / "run"):
        os.kill(pid, signal.SIGKILL)


@dataclass
class Seen:
    """What a stack said at its start, its nodes, and the devices that each worker of a task saw."""

    said: str
    nodes: list[Record]
    shown: dict[str, Record]


def trains(run_dir: Path, corpus: Path, devices: int, options: Sequence[str] = (), least: int = 1) -> Seen:
    """Start a stack on a machine with these devices, and train a short task on at least so many workers to its end."""
    folder = run_dir.parent
    nvml = RecordedNvml(folder / "nvml", devices=devices)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [*UNICRON, "up", "--run-dir", str(run_dir), "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
            env=environment | nvml.environment,
        )
    try:
        assert process.stdout is not None
        with process.stdout:
            url = process.stdout.readline().removeprefix("ready ").strip()
        assert url.startswith("http"), (folder / "said").read_text()
        (folder / "shown").mkdir()
        script = folder / "shows.py"
        script.write_text(SHOWS)
        env = {"SHOWN": str(folder / "shown"), "CUDA_VISIBLE_DEVICES": "0"}
        with Client(url) as client:
            numbers = {"min": least, "max": 4}
            client.submit(small_task("short", corpus, steps=6, script=str(script), env=env, workers=numbers))
            task = client.until_state("short", "succeeded")
            assert task["result"]["steps"] == 6

            def known() -> list[Record] | None:
                found = client.items("/v1/nodes")
                return found if all(bool(node["devices"]) == (node["hardware"] != "cpu") for node in found) else None

            nodes = client.until("the nodes have said what their devices are", known)
        assert "n0" in cli("nodes", server=url)
    finally:
        stop(process, run_dir)
    shown = {path.name: json.loads(path.read_text()) for path in (folder / "shown").iterdir()}
    return Seen((folder / "said").read_text(), nodes, shown)


def workers(seen: Seen) -> dict[str, int]:
    return {node["name"]: len(node["workers"]) for node in seen.nodes}


def test_one_device_is_one_worker(run_dir: Path, corpus: Path) -> None:
    seen = trains(run_dir, corpus, 1)
    assert seen.said == "trains on 1 device: NVIDIA H100 80GB HBM3\n"
    assert workers(seen) == {"n0": 1}
    assert {name: rank["visible"] for name, rank in seen.shown.items()} == {"n0-0": "0"}


def test_nodes_of_one_machine_share_its_devices_out(run_dir: Path, corpus: Path) -> None:
    seen = trains(run_dir, corpus, 5, ["--nodes", "2"], least=4)
    assert seen.said == "trains on 4 devices: NVIDIA H100 80GB HBM3, 1 left over\n"
    assert workers(seen) == {"n0": 2, "n1": 2}
    shown = {name: rank["visible"] for name, rank in seen.shown.items()}
    assert shown == {"n0-0": "0", "n0-1": "1", "n1-0": "2", "n1-1": "3"}
    devices = {node["name"]: {one["device"]: one["workers"] for one in node["devices"]} for node in seen.nodes}
    assert devices == {"n0": {0: ["n0/0"], 1: ["n0/1"]}, "n1": {2: ["n1/0"], 3: ["n1/1"]}}


def test_more_workers_than_devices_train_on_the_cpu_all_of_them(run_dir: Path, corpus: Path) -> None:
    seen = trains(run_dir, corpus, 1, ["--nodes", "2", "--workers-per-node", "1"])
    assert seen.said == "trains on the CPU: 1 device, its workers need 2\n"
    assert workers(seen) == {"n0": 1, "n1": 1}
    assert seen.shown
    assert {(rank["visible"], rank["cuda"]) for rank in seen.shown.values()} == {("", False)}


def test_without_devices_nothing_is_said(run_dir: Path, corpus: Path) -> None:
    seen = trains(run_dir, corpus, 0)
    assert seen.said == ""
    assert workers(seen) == {f"n{index}": 2 for index in range(4)}
    assert {rank["visible"] for rank in seen.shown.values()} == {""}


def test_devices_that_do_not_suffice_are_refused_before_anything_starts(run_dir: Path) -> None:
    nvml = RecordedNvml(run_dir.parent / "nvml", devices=1)
    options = ["--nodes", "4", "--device", "cuda", "--run-dir", str(run_dir)]
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [*UNICRON, "up", *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment | nvml.environment,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--device cuda: 1 device, its workers need 4; --device cpu trains without" in done.stderr
    assert not run_dir.exists()
