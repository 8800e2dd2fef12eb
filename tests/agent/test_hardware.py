"""The kind of a node's workers, and their devices, with the real pynvml over a recorded NVML."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from services.agent.machine import hardware, nvml
from services.agent.machine.hardware import NodeHardware, listed
from shared.errors import NoDevice
from shared.planning.performance.hardware import names
from tests.agent.recorded_nvml import COMPILER, RecordedNvml

needs_library = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler for the stand-in library")


@pytest.mark.parametrize(
    ("device", "profile"),
    [
        (None, "cpu"),
        ("", "cpu"),
        ("Tesla V100-SXM3-32GB", "v100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA A800-SXM4-80GB", "a800-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_a_device_has_the_profile_of_its_name(device: str | None, profile: str) -> None:
    assert hardware.profile_of(device) == profile
    assert profile in names()


def test_a_device_without_a_profile_is_a_kind_of_its_own() -> None:
    assert hardware.profile_of("NVIDIA GeForce RTX 4090") == "nvidia-geforce-rtx-4090"
    assert hardware.profile_of("NVIDIA A1000") == "nvidia-a1000"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[RecordedNvml]:
    """A machine with three devices."""
    recorded = RecordedNvml(tmp_path / "nvml", devices=3)
    with recorded.loaded():
        yield recorded


def of_node(workers: int, *, setting: str = "", visible: str | None = None) -> NodeHardware:
    return hardware.of_node("n0", [f"n0/{slot}" for slot in range(workers)], setting=setting, visible=visible)


@pytest.mark.parametrize(
    ("visible", "entries"),
    [
        (None, None),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("4, 5,6", ["4", "5", "6"]),
        ("1,-1,2", ["1"]),
        ("GPU-a,", ["GPU-a"]),
    ],
)
def test_a_list_of_devices_ends_where_cuda_lets_it_end(visible: str | None, entries: list[str] | None) -> None:
    assert listed(visible) == entries


@needs_library
@pytest.mark.parametrize(
    ("visible", "shown"),
    [(None, ["0", "1"]), ("2,0", ["2", "0"]), ("GPU-2,GPU-0,GPU-1", ["GPU-2", "GPU-0"]), ("0,0", ["0", "0"])],
)
def test_each_worker_sees_a_device_of_its_own_alone(
    visible: str | None, shown: list[str], machine: RecordedNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    found = of_node(2, visible=visible)
    assert found.kind == "h100"
    assert [found.environment(worker) for worker in found.workers] == [
        {"CUDA_VISIBLE_DEVICES": one, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} for one in shown
    ]


@needs_library
@pytest.mark.parametrize(
    ("workers", "setting", "visible", "detail"),
    [
        (
            4,
            "",
            None,
            "node n0: worker n0/3 has no device: 3 devices are there (0: NVIDIA H100 80GB HBM3, 1: NVIDIA H100 80GB "
            "HBM3, 2: NVIDIA H100 80GB HBM3); set UNICRON_WORKERS_PER_NODE to 3 or less, or UNICRON_HARDWARE=cpu for "
            "workers without devices",
        ),
        (
            2,
            "h100",
            "2,7,1",
            "node n0: worker n0/1 has no device: 1 device is there (2: NVIDIA H100 80GB HBM3), with "
            "CUDA_VISIBLE_DEVICES=2,7,1, UNICRON_HARDWARE=h100; set UNICRON_WORKERS_PER_NODE to 1 or less, or "
            "UNICRON_HARDWARE=cpu for workers without devices",
        ),
    ],
)
def test_a_worker_without_a_device_beside_others_is_refused(
    workers: int, setting: str, visible: str | None, detail: str, machine: RecordedNvml
) -> None:
    with pytest.raises(NoDevice) as refused:
        of_node(workers, setting=setting, visible=visible)
    assert refused.value.detail == detail
    assert (refused.value.code, refused.value.exit_code) == ("no-device", 2)
    [error] = refused.value.extra["errors"]
    assert (error["field"], error["value"]) == ("workers_per_node", workers)


@needs_library
@pytest.mark.parametrize(("setting", "visible"), [("cpu", None), ("cpu", "0"), ("", ""), ("", "-1")])
def test_a_node_that_is_to_use_no_device_shows_none_to_any_worker(
    setting: str, visible: str | None, machine: RecordedNvml
) -> None:
    found = of_node(8, setting=setting, visible=visible)
    assert (found.kind, found.entries) == ("cpu", ())
    assert found.environment("n0/0") == {"CUDA_VISIBLE_DEVICES": ""}
    assert hardware.device_count(visible, setting) == 0


@needs_library
def test_a_machine_without_a_driver_has_workers_of_the_kind_cpu(machine: RecordedNvml) -> None:
    (machine.folder / "recording").unlink()
    assert of_node(2) == NodeHardware("cpu", ("n0/0", "n0/1"))


@needs_library
@pytest.mark.parametrize(
    ("setting", "visible", "asked"),
    [("h100", None, "UNICRON_HARDWARE=h100"), ("", "0,1", "CUDA_VISIBLE_DEVICES=0,1")],
)
def test_devices_that_were_asked_for_and_are_not_there_are_missed(
    setting: str, visible: str | None, asked: str, machine: RecordedNvml
) -> None:
    """A node of a kind of devices without any would put its workers among those that have one."""
    (machine.folder / "recording").unlink()
    with pytest.raises(NoDevice, match=f"worker n0/0 has no device: there is no device, with {asked}; set UNICRON_H"):
        of_node(2, setting=setting, visible=visible)


@needs_library
def test_a_kind_can_be_given_to_workers_that_were_told_to_have_no_device(machine: RecordedNvml) -> None:
    """So that planning for devices can be tried without one."""
    assert of_node(2, setting="h100", visible="") == NodeHardware("h100", ("n0/0", "n0/1"))


@needs_library
def test_a_lost_device_is_still_that_of_its_worker(machine: RecordedNvml) -> None:
    """The agent starts, and its watch reports the fault."""
    machine.answer(device__0__error=str(pynvml.NVML_ERROR_GPU_IS_LOST))
    assert of_node(3) == NodeHardware("h100", ("n0/0", "n0/1", "n0/2"), ("0", "1", "2"))
    assert hardware.devices(None).problem == "the driver does not name its devices: 0 is lost, or gives no answer"
    for index in (1, 2):
        machine.answer(**{f"device__{index}__error": str(pynvml.NVML_ERROR_GPU_IS_LOST)})
    assert of_node(3).kind == "gpu"


def test_a_driver_that_cannot_be_asked_is_no_missing_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "pynvml", None)
    monkeypatch.setattr(nvml, "CONTROL_DEVICE", str(tmp_path))
    with pytest.raises(NoDevice, match="worker n0/0 has no device: the driver cannot be asked: nvidia-ml-py is not"):
        of_node(1)
    assert of_node(1, setting="cpu").kind == "cpu"
    monkeypatch.setattr(nvml, "CONTROL_DEVICE", str(tmp_path / "none"))
    assert of_node(1).kind == "cpu"
