"""Why a child of the stack did not start: in one sentence, where the child says it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli.stack.child import Child
from shared.errors import Conflict, InvalidInput
from tests.agent.recorded_nvml import COMPILER, RecordedNvml
from tests.nats_server import OpenServer
from tests.versions.test_log import joined, newer_log

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
async def test_a_log_of_a_newer_version_is_refused_in_one_sentence(tmp_path: Path) -> None:
    newer_log(tmp_path, joined(2, type="task.dreamt"))
    (tmp_path / "services").mkdir()
    async with OpenServer(tmp_path / "nats") as nats:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "UNICRON_RUN_DIR": str(tmp_path),
            "UNICRON_NATS_URL": nats.url,
            "UNICRON_NATS_CREDENTIAL": str(nats.credential_file),
        }
        with pytest.raises(Conflict) as refused:
            await Child("planner", "services.planner.main", environment, tmp_path).start()
    assert refused.value.exit_code == 4
    assert refused.value.detail == (
        "planner did not start: newer-version: position 2: event 'task.dreamt', schema version 1: its type is not "
        "known here; a newer version of Unicron has written this log, and is needed to read it"
    )


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler for the stand-in library")
async def test_an_agent_without_devices_for_its_workers_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    nvml = RecordedNvml(tmp_path / "nvml", devices=1)
    async with OpenServer(tmp_path / "nats") as nats:
        nats.keys.make([nats.url])
        credential = nats.keys.add_node("n0")
        nats.reload()
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | {
            **nvml.environment,
            "PYTHONPATH": str(ROOT),
            "UNICRON_RUN_DIR": str(tmp_path),
            "UNICRON_NATS_CREDENTIAL": str(credential),
        }
        with pytest.raises(InvalidInput) as refused:
            await Child("n0", "services.agent.main", environment, tmp_path).start()
    assert refused.value.detail == (
        "n0 did not start: no-device: node n0: worker n0/1 has no device: 1 device is there (0: NVIDIA H100 80GB "
        "HBM3); set UNICRON_WORKERS_PER_NODE to 1 or less, or UNICRON_HARDWARE=cpu for workers without devices"
    )
