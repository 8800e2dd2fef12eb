"""The kind of a node's workers."""

from __future__ import annotations

import pytest

from services.agent import hardware
from shared.planning.performance.hardware import names


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


def test_the_setting_comes_before_the_driver() -> None:
    assert hardware.kind("h200") == "h200"


def test_whatever_the_driver_says_the_node_has_a_kind() -> None:
    name = hardware.device_name()
    assert hardware.kind("") == hardware.profile_of(name)
    assert name is not None or hardware.kind("") == "cpu"


@pytest.mark.parametrize(
    ("visible", "shown"), [(None, "2"), ("4, 5,6 ,7", "6"), ("GPU-a,GPU-b,GPU-c", "GPU-c"), ("0,1", ""), ("", "")]
)
def test_a_worker_sees_its_device_alone(visible: str | None, shown: str) -> None:
    assert hardware.device_environment("rack/n0/2", visible) == {"CUDA_VISIBLE_DEVICES": shown}
