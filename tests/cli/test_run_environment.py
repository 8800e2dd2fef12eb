"""``unicron run``: which variables travel to a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from cli.launch.environment import Travelling, absolute, travelling
from shared.errors import InvalidInput
from shared.tasks import code
from unicron.protocol import environment

HERE = Path("/here")


def of(
    around: Mapping[str, str],
    in_front: Mapping[str, str] = {},
    named: Sequence[str] = (),
    known: Mapping[str, str] = {},
) -> Travelling:
    return travelling(around, in_front, named, known, HERE)


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_DEBUG", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS", "HF_HOME",
        "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "GLOO_LOG_LEVEL", "PYTORCH_CUDA_ALLOC_CONF", "NVTE_FUSED_ATTN",
        "TOKENIZERS_PARALLELISM", "MEGATRON_LOGGING_LEVEL",
    ],
)  # fmt: skip
def test_settings_of_the_libraries_travel(name: str) -> None:
    assert of({name: "1", "PATH": "/bin", "HOME": "/root", "LD_PRELOAD": "x"}).env == {name: "1"}


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_MPS_PIPE_DIRECTORY", "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME", "NCCL_COMM_ID", "PATH", "HOME", "USER", "LD_LIBRARY_PATH", "WANDB_PROJECT", "HF_TOKEN",
        "RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "UNICRON_TOKEN",
    ],
)  # fmt: skip
def test_what_is_of_this_machine_or_of_nobody_stays(name: str) -> None:
    assert of({name: "1"}) == ({}, [], [])


def test_what_the_user_names_travels() -> None:
    around = {"WANDB_PROJECT": "mine", "NCCL_SOCKET_IFNAME": "ib0", "NCCL_DEBUG": "WARN", "OTHER": "1"}
    found = of(around, {"NCCL_DEBUG": "INFO", "LD_LIBRARY_PATH": "/x"}, ["WANDB_PROJECT", "NCCL_SOCKET_IFNAME"])
    assert found.env == {
        "WANDB_PROJECT": "mine", "NCCL_SOCKET_IFNAME": "ib0", "NCCL_DEBUG": "INFO", "LD_LIBRARY_PATH": "/x",
    }  # fmt: skip


def test_devices_never_travel() -> None:
    found = of({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"})
    assert (found.env, found.devices) == ({}, ["CUDA_VISIBLE_DEVICES"])
    with pytest.raises(InvalidInput, match="CUDA_VISIBLE_DEVICES"):
        of({"CUDA_VISIBLE_DEVICES": "0"}, named=["CUDA_VISIBLE_DEVICES"])


SECRETS = {"WANDB_API_KEY": "0123", "HUB": "hf_abcdefghijklmnopqrstuvwxyz", "PROXY": "http://me:pass@host"}


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_that_the_user_names_is_refused_and_not_shown(name: str) -> None:
    for around, in_front, named in ((SECRETS, {}, [name]), ({}, {name: SECRETS[name]}, [])):
        with pytest.raises(InvalidInput) as refused:
            of(around, in_front, named)
        assert SECRETS[name] not in str(refused.value.problem())
        assert f"secrets: {{{name}: file:/path}}" in refused.value.detail
        (error,) = refused.value.extra["errors"]
        assert (error["field"], error["value"]) == ("--env", name)


def test_a_secret_among_the_settings_stays_here_and_is_named() -> None:
    around = {"HF_HUB_TOKEN": "x", "NCCL_DEBUG": "INFO", "TORCH_X": "https://me:pass@host/"}
    assert of(around) == ({"NCCL_DEBUG": "INFO"}, ["HF_HUB_TOKEN", "TORCH_X"], [])
    assert of(around, known={"HF_HUB_TOKEN": "file:/a", "TORCH_X": "file:/b"}).secret == []


def test_a_name_that_is_not_set_or_is_none_is_refused() -> None:
    for name in ("NOT_SET", "A=1"):
        with pytest.raises(InvalidInput, match="--env"):
            of({"A": "1"}, named=[name])
    with pytest.raises(InvalidInput, match="secrets:"):
        of({"A": "1"}, named=["A"], known={"A": "file:/a"})


def test_modules_are_found_from_another_folder() -> None:
    assert of({"PYTHONPATH": ".:/opt/lm::lib"}).env == {"PYTHONPATH": "/here:/opt/lm:/here/lib"}
    assert absolute({"PYTHONPATH": ""}, HERE) == {"PYTHONPATH": ""}


def test_command_and_ranks_name_the_folder_alike() -> None:
    assert environment.WORKING_DIRECTORY == code.WORKING_DIRECTORY
