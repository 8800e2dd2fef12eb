"""Which variables travel from a command line to the processes of a task, and which do not.

What a specification contains is in the log and in the API's answers, for everybody who may read there. So of the
environment only variables of known families travel to a cluster, and those that the user names. On this machine
processes inherit the environment, and none of it is written anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shared.errors import InvalidInput
from shared.tasks import secrets
from shared.tasks.code import SEARCH_PATH

PREFIXES = (
    "CUDA_", "GLOO_", "HF_DATASETS_", "HF_HUB_", "MEGATRON_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TOKENIZERS_",
    "TORCHINDUCTOR_", "TORCH_", "TRANSFORMERS_", "TRITON_",
)  # fmt: skip
"""Families of variables that travel: settings of the libraries that a training process uses."""

NAMES = frozenset({"HF_HOME", "PYTHONPATH"})
"""Other variables that travel: where a script finds models and modules."""

OF_DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"})
"""The agent of each node gives its processes their devices."""

OF_THE_MACHINE = frozenset(
    {"CUDA_BIN_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "GLOO_SOCKET_IFNAME", "NCCL_COMM_ID", "NCCL_HOSTID",
     "NCCL_SOCKET_IFNAME", "NCCL_TOPO_FILE"}
)  # fmt: skip
"""Variables of the families that say how one machine is; they travel if the user names them."""

_OF_THE_MACHINE = ("CUDA_MPS_",)


class Travelling(NamedTuple):
    """The variables of a task, and those that were left out. ``secret``: their names; ``devices``: the same."""

    env: dict[str, str]
    secret: list[str]
    devices: list[str]


def travelling(
    around: Mapping[str, str],
    in_front: Mapping[str, str],
    named: Sequence[str],
    known: Mapping[str, str],
    directory: Path,
) -> Travelling:
    """Return the variables that travel to the nodes of a cluster.

    Args:
        around: the environment of this process.
        in_front: variables that the command line sets.
        named: names that the user has given (``--env``).
        known: variables whose values are secrets in files on the nodes (``secrets:``); they do not travel.
        directory: the working directory.

    Raises:
        InvalidInput: a variable that the user has named is not set here, or looks secret, or is of devices.
    """
    check_named(named, around)
    families = {name: value for name, value in around.items() if _of_family(name)}
    given = {**{name: around[name] for name in named}, **in_front}
    for name, value in given.items():
        if name in known:
            raise _refused(name, "is in secrets:, too")
        if looks_secret(name, value):
            raise _refused(name, f"{secrets.WHY}; instead: a file on the nodes, and secrets: {{{name}: file:/path}} "
                           "in a file for --spec")  # fmt: skip
        if name in OF_DEVICES and name in named:
            raise _refused(name, "does not travel: node agents give processes their devices; see --workers")
    secret = [name for name, value in families.items() if looks_secret(name, value) and name not in known]
    env = {
        name: value
        for name, value in {**families, **given}.items()
        if name not in known and name not in secret and name not in OF_DEVICES
    }
    return Travelling(absolute(env, directory), sorted(secret), sorted(OF_DEVICES & in_front.keys()))


def check_named(named: Sequence[str], around: Mapping[str, str]) -> None:
    """Check that each variable that the user has named is set.

    Raises:
        InvalidInput: one is not.
    """
    for name in named:
        if "=" in name:
            name = name.partition("=")[0]
            raise _refused(name, "must be the name of a variable alone; a value goes in front: -- NAME=VALUE SCRIPT")
        if name not in around:
            raise _refused(name, "is not set here")


def absolute(env: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return variables with the search path of modules as absolute paths: processes start in another folder."""
    if not env.get(SEARCH_PATH):
        return dict(env)
    folders = (str(directory / folder) for folder in env[SEARCH_PATH].split(os.pathsep) if folder)
    return {**env, SEARCH_PATH: os.pathsep.join(folders)}


def looks_secret(name: str, value: str) -> bool:
    """Return whether a variable shows that its value is secret."""
    return secrets.is_secret_name(name) or secrets.looks_secret(value)


def _of_family(name: str) -> bool:
    if name in OF_THE_MACHINE or name.startswith(_OF_THE_MACHINE):
        return False
    return name in NAMES or name.startswith(PREFIXES)


def _refused(name: str, problem: str) -> InvalidInput:
    return InvalidInput.of("--env", name, problem)
