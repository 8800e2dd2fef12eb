"""``unicron up`` as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.by_hand import UNICRON, cli, events, start, stop, until_gone
from tests.e2e.kit import Client, Pace, processes_of, small_task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run directory with a path far longer than a Unix socket's 108 bytes."""
    path = tmp_path / "/".join(["a-rather-long-folder-name"] * 6) / "run"
    yield path
    for pid in processes_of(path):
        os.kill(pid, signal.SIGKILL)


def by_hand(run_dir: Path, url: str, spec: Path, corpus: Path) -> None:
    """Submit, look, replay; a second stack is refused, and so is a wrong specification."""
    second = subprocess.run(
        [*UNICRON, "up", "--run-dir", str(run_dir), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 4
    assert "in use" in second.stderr
    assert second.stdout == ""
    spec.write_text(yaml.safe_dump(small_task("hand", corpus, steps=12)))
    cli("submit", str(spec), server=url)
    with Client(url) as client:
        client.until_state("hand", "succeeded")
    task = json.loads(cli("show", "hand", "-o", "json", server=url))
    assert (task["state"], task["step"]) == ("succeeded", 12)
    assert Path(task["result"]["parameters_path"]).exists()

    # tests/cli runs every verb in both formats against a real server; here are those that read what ranks left.
    assert "generation 1 from initial" in cli("logs", "hand", server=url)
    plans: list[Any] = json.loads(cli("plan", "list", "-o", "json", server=url))["items"]
    assert "hand" in cli("plan", "show", plans[-1]["id"], server=url)
    report = json.loads(cli("replay", str(run_dir / "log.db"), "--verify", "-o", "json", server=url))
    assert report["chain_ok"]
    assert report["mismatches"] == []
    assert report["verified"] == report["plans"] > 0
    before = len(events(url))
    spec.write_text(yaml.safe_dump(small_task("bad", corpus, steps=0, colour="red")))
    cli("submit", str(spec), server=url, code=2)
    assert len(events(url)) == before


def test_up_stop_up_again_and_sudden_death(run_dir: Path, corpus: Path, tmp_path: Path) -> None:
    """All by hand; Ctrl-C stops everything; the next stack goes on; the stack's own death leaves nothing either.

    A task that was running when the stack stopped goes on from its checkpoint in the next one, and no node counts as
    lost. Killed, a stack takes every process with it that it started, ranks included.
    """
    process, url = start(run_dir)
    try:
        by_hand(run_dir, url, tmp_path / "task.yaml", corpus)
        pace = Pace(tmp_path, 0.05)
        with Client(url) as client:
            client.submit(pace.of(small_task("again", corpus, checkpoint={"every": 5})))
            client.until_step("again", 12)
    finally:
        stop(process, run_dir)
    pace.end()

    process, url = start(run_dir)
    try:
        with Client(url) as client:
            task = client.until_state("again", "succeeded")
            assert task["result"]["steps"] == 40
            nodes = [r["type"] for r in events(url) if r["stream"] == "node/n0"]
            assert nodes == ["node.joined", "node.left", "node.joined"]
            assert client.items("/v1/incidents") == []
            client.submit(small_task("orphan", corpus, steps=10_000))
            client.until_step("orphan", 2)
    finally:
        process.kill()
        process.wait()
    until_gone(run_dir)


@pytest.mark.short
def test_unreachable_server() -> None:
    """No server: a clear message and its own exit code."""
    cli("ps", server="http://127.0.0.1:9", code=5)
