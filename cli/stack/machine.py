"""What a node's processes get on this machine, as part of an embedded stack: environment, memory, address."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from services.agent.files.snapshot_folders import node_folder
from services.agent.machine import address
from services.agent.machine.hardware import VISIBLE_VARIABLE
from shared.service.joining import CREDENTIAL
from shared.settings.model import Settings

RANK_NICE = 5
"""Ranks of several nodes share this machine's cores with the services: these must answer in milliseconds, and a node
that comes back must not wait for ranks to import what it needs. Five gives ranks a third of a contended core."""


def environment_of(run_dir: Path, url: str, credential: Path, further: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process.

    Args:
        run_dir: where everything is written.
        url: of NATS.
        credential: the child's.
        further: variables beside those of this process.
    """
    return {
        **os.environ,
        # One thread for each process: workers share the cores, and sums are the same everywhere.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "UNICRON_RANK_NICE": str(RANK_NICE),
        **further,
        # The pid, not 1: a child then notices a parent that ended while the child was starting.
        "UNICRON_PARENT_DEATH": str(os.getpid()),
        "UNICRON_RUN_DIR": str(run_dir),
        "UNICRON_NATS_URL": url,
        CREDENTIAL: str(credential),
        # One address serves one process; the api has the cluster's metrics at its own.
        "UNICRON_METRICS_ADDRESS": "",
    }


def agent_variables(node: str, devices: str, workers_per_node: int) -> dict[str, str]:
    """Return what the environment of a node's agent has beside that. ``devices``: ``CUDA_VISIBLE_DEVICES``."""
    return {
        "UNICRON_NODE": node,
        # A planned stop of all nodes moves nothing: there is nowhere to move to.
        "UNICRON_DRAIN_TIMEOUT_S": "0",
        VISIBLE_VARIABLE: devices,
        "UNICRON_WORKERS_PER_NODE": str(workers_per_node),
    }


def forget_memory(memory_dir: Path, run_dir: Path, node: str) -> None:
    """Delete the snapshots that a node of a run had in memory."""
    shutil.rmtree(node_folder(memory_dir, run_dir, node), ignore_errors=True)


def own_address(settings: Settings) -> str:
    """Return the address at which other machines reach this one: that of the settings, else an IPv4 address.

    The host name may stand for a loopback address here, and then an interface's address counts.

    Raises:
        InvalidInput: there is none.
    """
    own = [ip for addresses in address.interfaces().values() for ip in addresses[:1]]
    with suppress(OSError):
        own = [str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)] + own
    usable = (ip for ip in own if ":" not in ip and not ip_address(ip).is_loopback)
    return address.find(settings, next(usable, ""), "").ip
