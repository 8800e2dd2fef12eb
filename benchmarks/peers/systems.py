"""Starts the job of ``benchmarks.recovery`` under each system, and waits for its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import venv
from pathlib import Path
from typing import Protocol

from benchmarks.peers.job import DATA_VARIABLE, FAULT_VARIABLE, FOLDER_VARIABLE
from cli.stack.processes import kill_below
from cli.stack.stack import Stack
from cli.waiting import Record, WaitingClient
from shared.errors import TimedOut, Unavailable

ROOT = Path(__file__).resolve().parents[2]

LIMIT_S = 200.0
"""Longest time of one run: torchrun needs about 80 s where a rank is stopped."""

POLL_S = 0.1
"""Time between two looks at whether the launchers have exited."""

END_S = 5.0
"""Ranks exit within this after the result is written; a rank that is stopped, or was restarted too late, never does."""

START_S = 60.0
"""Longest start of the lighthouse, which imports torch first."""

RESULT = "parameters.safetensors"


class System(Protocol):
    """A way to run the job."""

    name: str

    async def start(self) -> None:
        """Start the parts that serve all runs."""

    async def run(self, folder: Path, fault: str) -> Record:
        """Run the job of a folder to its end; return the system's own account of it."""

    async def stop(self) -> None:
        """Stop the parts that serve all runs."""


def environment(folder: Path, fault: str) -> dict[str, str]:
    """Return the variables that the scripts read from their environment."""
    return {FOLDER_VARIABLE: str(folder), FAULT_VARIABLE: fault, DATA_VARIABLE: str(folder.parent / "data")}


class Unicron:
    """The whole stack: services, one agent for each rank, tasks submitted over REST."""

    name = "unicron"

    def __init__(self, ranks: int, folder: Path) -> None:
        self._ranks = ranks
        self._stack = Stack(folder / "unicron", nodes=ranks, workers_per_node=1, environment={"PYTHONPATH": str(ROOT)})

    async def start(self) -> None:
        await self._stack.start()

    async def run(self, folder: Path, fault: str) -> Record:
        document = json.loads((folder / "spec.json").read_text())
        task = {
            **document,
            "name": folder.name,
            "script": str(ROOT / "benchmarks" / "peers" / "unicron_gpt.py"),
            "workers": {"min": 1, "max": self._ranks},
            "env": environment(folder, fault),
        }
        async with WaitingClient(self._stack.url) as client:
            await client.submit(task)
            try:
                ended = await client.until_ended(folder.name, LIMIT_S)
            except TimedOut:
                ended = await client.task(folder.name)  # a result of this run: it did not end
            incidents = await client.incidents()
        if ended["state"] == "succeeded":
            shutil.copyfile(ended["result"]["parameters_path"], folder / RESULT)
        keys = ("kind", "severity", "occurred_at", "detected_at", "resumed_at", "restored_at", "phases")
        own = [{k: i.get(k) for k in keys} for i in incidents if i["task"] == folder.name]
        return {"state": ended["state"], "incidents": own}

    async def stop(self) -> None:
        await self._stack.stop()


class Launched:
    """A system that a few commands start for each run."""

    name = ""

    def __init__(self, ranks: int, python: Path) -> None:
        self._ranks, self._python = ranks, python
        self._cancelled = threading.Event()

    async def start(self) -> None:
        """Do nothing: no part of the system outlives a run."""

    async def stop(self) -> None:
        """Do nothing, as ``start``."""

    async def run(self, folder: Path, fault: str) -> Record:
        try:
            return await asyncio.to_thread(self._run, folder, fault)
        except asyncio.CancelledError:
            self._cancelled.set()  # the thread cannot be cancelled, and would run for up to LIMIT_S
            raise

    def _run(self, folder: Path, fault: str) -> Record:
        raise NotImplementedError

    def _until_ended(self, folder: Path, launchers: list[subprocess.Popen[bytes]]) -> Record:
        """Wait until all have exited, the limit has passed, or the run is cancelled; end those that still run."""
        deadline = time.monotonic() + LIMIT_S
        try:
            while any(launcher.poll() is None for launcher in launchers) and time.monotonic() < deadline:
                if (folder / RESULT).exists():
                    deadline = min(deadline, time.monotonic() + END_S)
                if self._cancelled.wait(POLL_S):
                    break
            return {"exit_codes": [launcher.poll() for launcher in launchers]}
        finally:
            end(launchers)

    def _launch(self, folder: Path, name: str, *command: str, **more: str) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [str(self._python), *command],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


class Torchrun(Launched):
    """torchrun with restarts, and a checkpoint every ten steps."""

    name = "torchrun"

    def _run(self, folder: Path, fault: str) -> Record:
        launcher = self._launch(
            folder,
            "torchrun",
            *("-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={self._ranks}", "--max-restarts=3"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
            *("-m", "benchmarks.peers.torchrun_gpt"),
            # Sharing one store between restarts, torch 2.13's default, often fails to restart under gloo.
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            **environment(folder, fault),
        )
        return self._until_ended(folder, [launcher])


class Torchft(Launched):
    """torchft: a lighthouse with a heartbeat time-out of 1 s, and a torchrun with restarts for each replica."""

    name = "torchft"

    def _run(self, folder: Path, fault: str) -> Record:
        log = folder / "lighthouse.log"
        with log.open("ab") as output:
            lighthouse = subprocess.Popen(
                [
                    str(self._python.parent / "torchft_lighthouse"),
                    *("--bind", "127.0.0.1:0", "--min_replicas", "1", "--heartbeat_timeout_ms", "1000"),
                ],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "RUST_LOG": "info"},
            )
        launchers: list[subprocess.Popen[bytes]] = []
        try:
            address = self._address(log)
            launchers = [self._replica(folder, fault, address, rank) for rank in range(self._ranks)]
            return self._until_ended(folder, launchers)
        finally:
            end([lighthouse, *launchers])

    def _replica(self, folder: Path, fault: str, lighthouse: str, rank: int) -> subprocess.Popen[bytes]:
        return self._launch(
            folder,
            f"replica-{rank}",
            *("-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=3"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
            *("-m", "benchmarks.peers.torchft_gpt"),
            TORCHFT_LIGHTHOUSE=lighthouse,
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            RECOVERY_RANK=str(rank),
            RECOVERY_RANKS=str(self._ranks),
            **environment(folder, fault),
        )

    def _address(self, log: Path) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            found = re.search(r"http://\S+:(\d+)", log.read_text())
            if found:
                return f"http://127.0.0.1:{found[1]}"
            time.sleep(0.05)
        raise Unavailable(f"the lighthouse has not printed its address: {log.read_text()}")


def end(launchers: list[subprocess.Popen[bytes]]) -> None:
    """Kill these and everything below them."""
    for launcher in launchers:
        kill_below(launcher.pid)
        launcher.wait()


def environment_of(package: str, cache: Path) -> Path:
    """Return the Python of a virtual environment with a package of the index beside our torch; made if missing.

    Raises:
        subprocess.CalledProcessError: it cannot be installed.
    """
    folder = cache / package
    python = folder / "bin" / "python"
    installed = folder / "installed"
    if not installed.exists():
        venv.create(folder, with_pip=True, clear=True)
        # torch is a gigabyte: the one that runs this is used.
        ours = [path for path in sys.path if path.endswith("site-packages")]
        [theirs] = (folder / "lib").glob("python*/site-packages")
        (theirs / "ours.pth").write_text("\n".join(ours) + "\n")
        subprocess.run(
            [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q", package],
            check=True,
            capture_output=True,
            text=True,
        )
        installed.touch()
    return python


def version_of(python: Path, package: str) -> str:
    """Return which version of a package an interpreter has."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()
