"""torchrun's environment variables: a rank's own under an agent, and not those of another."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.unicron.zygote import environment as environment_of_tests
from unicron.link import torchrun
from unicron.link.torchrun import standalone_generation
from unicron.protocol import environment
from unicron.protocol.messages import Configure

WORKERS = ["a/0", "b/1", "a/3", "b/0"]


def generation(rank: int) -> Configure:
    return Configure(
        generation=7,
        stage="boundary",
        rank=rank,
        world_size=4,
        tensor=1,
        pipeline=1,
        store_host="10.0.0.1",
        store_port=4711,
        members=[[r, worker, "live"] for r, worker in enumerate(WORKERS)],
        directory="d",
    )


@pytest.mark.parametrize(("rank", "local", "group"), [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)])
def test_the_variables_tell_a_ranks_place(rank: int, local: int, group: int) -> None:
    found = torchrun.variables_of(generation(rank), one_device=False)
    assert found == {
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(group),
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4711",
        "UNICRON_GENERATION": "7",
    }
    assert set(found) == {*environment.TORCHRUN, environment.GENERATION}
    # A process that sees one device selects number 0, whatever its place on the node.
    assert torchrun.variables_of(generation(rank), one_device=True) == found | {"LOCAL_RANK": "0"}


def test_a_process_of_a_rank_is_not_one_of_torchruns_unless_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank's script starts inherits the rank's variables, and would wait for the rank's peers."""
    for name, value in torchrun.variables_of(generation(2), one_device=False).items():
        monkeypatch.setenv(name, value)
    alone = standalone_generation("d")
    assert (alone.rank, alone.world_size, alone.store_port) == (0, 1, 0)
    monkeypatch.setenv(environment.TORCHRUN_ID, "none")
    launched = standalone_generation("d")
    assert (launched.rank, launched.world_size, launched.store_port) == (2, 4, 4711)


def test_a_rank_does_not_inherit_the_variables_of_whoever_started_its_agent() -> None:
    program = (
        "import os, sys, types, unicron\n"
        "from unicron import forkserver\n"
        "from unicron.protocol import environment\n"
        "unicron.train = sys.modules['unicron.train'] = types.ModuleType('train')  # which would import torch\n"
        "names = {*environment.TORCHRUN, environment.GENERATION}\n"
        "unicron.train.child = lambda: print(sorted(names & {*os.environ})) or 0\n"
        "forkserver._train({'spec': 's', 'task': 't', 'worker': 'w'})\n"
    )
    inherited = torchrun.variables_of(generation(1), one_device=False)
    environ = environment_of_tests() | inherited
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environ, check=True, capture_output=True, text=True, cwd=os.getcwd()
    )
    assert ran.stdout == "[]\n"
