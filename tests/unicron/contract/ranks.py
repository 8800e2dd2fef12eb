"""Ranks for tests of the contract backend alone: processes that do what a function says, without a trainer."""

from __future__ import annotations

import concurrent.futures
import faulthandler
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from tests.unicron.contract import backend
from tests.unicron.contract.guard import BROKEN_RULE
from tests.unicron.contract.settings import Settings
from tests.unicron.zygote import zygote

LIMIT_S = 30
"""Of a rank. One that takes longer prints what its threads are at and ends."""


@dataclass(frozen=True, slots=True)
class Rank:
    """What a rank's function has."""

    number: int
    size: int
    signals: dist.Store
    """For ranks to wait for one another, beside all groups."""
    backend: backend.Contract


@dataclass(frozen=True, slots=True)
class End:
    """How a rank has ended."""

    code: int
    """Its exit status; -1: it was killed, or broke a rule."""
    output: str
    """What it printed, if the status is not 0."""

    @property
    def rule(self) -> str:
        """The rule that it broke, and what the threads concerned were at; empty: it broke none."""
        return self.output.partition(BROKEN_RULE)[2]


def run(body: Callable[[Rank], None], size: int, folder: Path, variables: Mapping[str, str]) -> list[End]:
    """Run a function of a test module in several ranks of a group; return how each has ended.

    Args:
        body: of the module's top level.
        size: how many ranks.
        folder: of the test.
        variables: the environment of the ranks.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    name = f"{body.__module__}:{body.__name__}"

    def run_one(rank: int) -> End:
        directory = folder / f"rank-{rank}"
        directory.mkdir()
        arguments = [str(rank), str(size), str(server.port), name, json.dumps(dict(variables))]
        try:
            zygote().run(["-m", "tests.unicron.contract.ranks", *arguments], directory)
        except subprocess.CalledProcessError as error:
            return End(error.returncode, error.output)
        return End(0, "")

    with concurrent.futures.ThreadPoolExecutor(size) as threads:
        return list(threads.map(run_one, range(size)))


def main(rank: str, size: str, port: str, name: str, variables: str) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **json.loads(variables)})
    settings = Settings.of_environment()
    assert settings is not None
    installed = backend.install(settings)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    dist.init_process_group("contract", store=dist.PrefixStore("groups", store), rank=int(rank), world_size=int(size))
    signals = dist.PrefixStore("signals", dist.TCPStore("127.0.0.1", int(port), is_master=False))
    module, _, function = name.partition(":")
    getattr(importlib.import_module(module), function)(Rank(int(rank), int(size), signals, installed))


if __name__ == "__main__":
    main(*sys.argv[1:])
