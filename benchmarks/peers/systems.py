"""Starting the job under each system, and waiting for its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil

from benchmarks.peers.job import DATA_VARIABLE, FAULT_VARIABLE, FOLDER_VARIABLE
from cli.stack import Stack

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]

LIMIT_S = 200.0
"""For one run: torchrun needs about 80 s where a rank is stopped."""

END_S = 5.0
"""After the result is written all ranks are about to exit; one that is stopped, or came too late, never does."""

START_S = 60.0
"""For a process that imports torch before it says anything."""

RESULT = "parameters.safetensors"


class System(Protocol):
    """A way to run the job."""

    name: str

    async def start(self) -> None:
        """Start what serves all runs."""

    async def run(self, folder: Path, fault: str) -> Record:
        """Run the job of a folder to its end; return what the system itself says of it."""

    async def stop(self) -> None:
        """Stop what serves all runs."""


def environment(folder: Path, fault: str) -> dict[str, str]:
    """Return what the scripts read from their environment."""
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
        async with httpx.AsyncClient(base_url=self._stack.url, timeout=10.0, trust_env=False) as client:
            (await client.post("/v1/tasks", json=task)).raise_for_status()
            deadline = time.monotonic() + LIMIT_S
            while time.monotonic() < deadline:
                state = (await client.get(f"/v1/tasks/{folder.name}")).raise_for_status().json()
                if state["state"] in ("succeeded", "failed"):
                    break
                await asyncio.sleep(0.1)
            answer = (await client.get("/v1/incidents", params={"limit": 1000})).raise_for_status().json()
        if state["state"] == "succeeded":
            shutil.copyfile(state["result"]["parameters_path"], folder / RESULT)
        keys = ("kind", "severity", "occurred_at", "detected_at", "resumed_at", "restored_at", "phases")
        incidents = [{k: i.get(k) for k in keys} for i in answer["items"] if i["task"] == folder.name]
        return {"state": state["state"], "incidents": incidents}

    async def stop(self) -> None:
        await self._stack.stop()


class Launched:
    """A system that is a few commands for each run."""

    name = ""

    def __init__(self, ranks: int, python: Path) -> None:
        self._ranks, self._python = ranks, python

    async def start(self) -> None:
        """There is nothing that outlives a run."""

    async def stop(self) -> None:
        """There is nothing that outlives a run."""

    async def run(self, folder: Path, fault: str) -> Record:
        return await asyncio.to_thread(self._run, folder, fault)

    def _run(self, folder: Path, fault: str) -> Record:
        raise NotImplementedError

    def _until_ended(self, folder: Path, launchers: list[subprocess.Popen[bytes]]) -> Record:
        """Wait until all have exited, or some are left behind; end these."""
        deadline = time.monotonic() + LIMIT_S
        while any(launcher.poll() is None for launcher in launchers) and time.monotonic() < deadline:
            if (folder / RESULT).exists():
                deadline = min(deadline, time.monotonic() + END_S)
            time.sleep(0.1)
        codes = [launcher.poll() for launcher in launchers]
        end(launchers)
        return {"exit_codes": codes}

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
        raise RuntimeError(f"the lighthouse does not say where it listens: {log.read_text()}")


def end(launchers: list[subprocess.Popen[bytes]]) -> None:
    """Kill these and everything below them."""
    for launcher in launchers:
        with suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(launcher.pid).children(recursive=True), psutil.Process(launcher.pid)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
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
