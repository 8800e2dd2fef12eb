"""Where the workers of an embedded stack train, with 0, 1 and 8 devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.demo.run import NODES, WORKERS_PER_NODE
from cli.stack.devices import Device, Division, divide, found
from cli.stack.stack import Stack
from services.agent.machine.hardware import Devices
from shared.errors import NoDevice
from tests.agent.recorded_nvml import COMPILER, RecordedNvml

NAME = "NVIDIA H100 80GB HBM3"


def machine(devices: int) -> Devices:
    return Devices(tuple(map(str, range(devices))), (NAME,) * devices, driver="570.1")


def of_demo(devices: int, wanted: Device = Device.AUTO) -> Division:
    return divide(machine(devices), wanted, NODES, WORKERS_PER_NODE, who="the demo")


def of_up(
    devices: int, nodes: int | None = None, workers: int | None = None, wanted: Device = Device.AUTO
) -> tuple[int, int, tuple[str, ...], str]:
    division = divide(machine(devices), wanted, nodes, workers, who="its workers")
    return division.nodes, division.workers_per_node, division.shown, division.said


def test_the_demo_trains_on_the_cpu_unless_each_worker_can_have_a_device() -> None:
    assert of_demo(0) == Division(4, 2)
    assert of_demo(1) == Division(4, 2, said="trains on the CPU: 1 device, the demo needs 8")
    assert of_demo(7).said == "trains on the CPU: 7 devices, the demo needs 8"
    shown = ("0,1", "2,3", "4,5", "6,7")
    assert of_demo(8) == Division(4, 2, shown, f"trains on 8 devices: {NAME}")
    assert of_demo(9) == Division(4, 2, shown, f"trains on 8 devices: {NAME}, 1 left over")
    assert of_demo(8, Device.CPU) == Division(4, 2)


def test_workers_of_a_stack_follow_from_the_devices() -> None:
    assert of_up(0) == (4, 2, (), "")
    assert of_up(1) == (1, 1, ("0",), f"trains on 1 device: {NAME}")
    assert of_up(8) == (1, 8, ("0,1,2,3,4,5,6,7",), f"trains on 8 devices: {NAME}")
    assert of_up(8, nodes=4)[:3] == (4, 2, ("0,1", "2,3", "4,5", "6,7"))
    assert of_up(8, nodes=3) == (3, 2, ("0,1", "2,3", "4,5"), f"trains on 6 devices: {NAME}, 2 left over")
    assert of_up(8, workers=4)[:3] == (2, 4, ("0,1,2,3", "4,5,6,7"))


def test_numbers_that_do_not_fit_the_devices_leave_the_cpu_for_all() -> None:
    assert of_up(1, nodes=4) == (4, 2, (), "trains on the CPU: 1 device, its workers need 4")
    assert of_up(1, workers=2) == (4, 2, (), "trains on the CPU: 1 device, its workers need 2")
    assert of_up(8, nodes=3, workers=3) == (3, 3, (), "trains on the CPU: 8 devices, its workers need 9")
    assert of_up(0, nodes=3, workers=3) == (3, 3, (), "")


@pytest.mark.parametrize(
    ("devices", "nodes", "workers", "why"),
    [(0, None, None, "there is no device"), (1, 4, 2, "1 device, its workers need 8")],
)
def test_devices_that_were_asked_for_and_do_not_suffice_are_refused(
    devices: int, nodes: int | None, workers: int | None, why: str
) -> None:
    with pytest.raises(NoDevice, match=f"--device cuda: {why}; --device cpu trains without") as refused:
        of_up(devices, nodes, workers, Device.CUDA)
    assert refused.value.extra["errors"] == [{"field": "--device", "value": "cuda", "problem": why}]


def test_a_driver_that_cannot_be_asked_is_named() -> None:
    there = Devices(problem="the driver cannot be asked: version mismatch")
    said = "trains on the CPU: the driver cannot be asked: version mismatch"
    assert divide(there, Device.AUTO, who="its workers") == Division(4, 2, said=said)


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler for the stand-in library")
def test_the_devices_are_those_that_this_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNICRON_HARDWARE", raising=False)
    with RecordedNvml(tmp_path / "nvml", devices=8).loaded():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7,0,1,2,3,4,5,6")
        shown = ("GPU-7,0", "1,2", "3,4", "5,6")
        assert divide(found(), Device.AUTO, NODES, WORKERS_PER_NODE, who="the demo").shown == shown
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert found() == Devices(("0",), (NAME,), "550.54.15")
        monkeypatch.setenv("UNICRON_HARDWARE", "cpu")
        assert found().entries == ()


def test_the_agents_of_a_stack_have_no_device_in_common(tmp_path: Path) -> None:
    def shown(devices: tuple[str, ...]) -> list[str]:
        stack = Stack(tmp_path / "run", nodes=2, workers_per_node=2, devices=devices)
        return [stack.agent_environment(node)["CUDA_VISIBLE_DEVICES"] for node in stack.node_names]

    assert shown(("0,1", "2,3")) == ["0,1", "2,3"]
    assert shown(()) == ["", ""]
