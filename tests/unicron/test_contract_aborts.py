"""The contract backend at an abort: what may happen beside it, and what it waits for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.condition import until_blocking
from tests.unicron.contract import settings
from tests.unicron.contract.communicator import State
from tests.unicron.contract.ranks import Rank, run
from tests.unicron.test_contract import ENDED, SILENT, everyone, only_communicator
from unicron.process import sockets

pytestmark = pytest.mark.timeout(60)


def does_beside_an_abort(rank: Rank) -> None:
    dist.barrier()
    other = dist.new_group([0])
    aborting = threading.Thread(target=rank.backend.abort, args=([everyone(), other],), name="aborting")
    aborting.start()
    until_blocking(lambda: only_communicator()._state is State.ABORTING)
    match os.environ["ACTION"]:
        case "issue":
            dist.all_reduce(torch.ones(1))
        case "make":
            rank.backend.connect(other)
        case "destroy":
            dist.destroy_process_group(other)
        case "abort":
            rank.backend.abort([other])


@pytest.mark.parametrize("action", ["issue", "make", "destroy", "abort"])
def test_nothing_may_happen_beside_an_abort(action: str, tmp_path: Path) -> None:
    (end,) = run(does_beside_an_abort, 1, tmp_path, SILENT | {settings.ABORT_S: "2", "ACTION": action})
    assert end.rule.startswith(f"{action} while another thread is in abort")
    assert "in does_beside_an_abort" in end.rule
    assert "thread aborting" in end.rule
    assert "in abort" in end.rule


def works_in_other_groups(rank: Rank) -> None:
    """What is not aborted can be used meanwhile, and communicators be made."""
    dist.barrier()
    other = dist.new_group([0])
    aborting = threading.Thread(target=rank.backend.abort, args=([everyone()],), daemon=True)
    aborting.start()
    until_blocking(lambda: only_communicator()._state is State.ABORTING)
    total = torch.ones(1)
    dist.all_reduce(total, group=other)
    assert total.item() == 1.0
    assert aborting.is_alive()


def aborts_beside_a_making(rank: Rank) -> None:
    dist.barrier()
    if rank.number == 1:
        rank.signals.wait(["never"])
    group = dist.new_group([0, 1])
    making = threading.Thread(target=rank.backend.connect, args=(group,), daemon=True)
    listening = sockets.listening()
    making.start()
    until_blocking(lambda: len(sockets.listening() - listening) == 2)  # the root's, and the rank's own
    rank.backend.abort([everyone(), group])


def test_no_abort_may_happen_beside_a_making(tmp_path: Path) -> None:
    limited = SILENT | {settings.ABORT_S: "2"}
    ends = run(aborts_first, 2, tmp_path, limited)
    assert ends[0].rule.startswith("abort while another thread is in make")


def aborts_first(rank: Rank) -> None:
    """``aborts_beside_a_making`` in rank 0; rank 1 makes the first communicator and is gone."""
    if rank.number == 0:
        aborts_beside_a_making(rank)
    else:
        dist.barrier()


def aborts_one_after_the_other(rank: Rank) -> None:
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (one, other):
        dist.barrier(group)
    if rank.number == 1:
        rank.signals.wait(["done"])
        return
    works: list[Any] = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in (one, other)]
    if os.environ["AT_ONCE"]:
        rank.backend.abort([one, other])
    else:
        aborting = threading.Thread(target=rank.backend.abort, args=([one],), daemon=True)
        aborting.start()
        works[0].wait()
        aborting.join(0.5)
        assert aborting.is_alive(), "it waits for the other group's collective, which is not aborted"
        rank.signals.set("done", "1")
        return
    assert all(work.is_completed() for work in works)
    rank.signals.set("done", "1")


@pytest.mark.parametrize("at_once", ["", "1"])
def test_an_abort_waits_for_what_hangs_in_other_groups(at_once: str, tmp_path: Path) -> None:
    assert run(aborts_one_after_the_other, 2, tmp_path, SILENT | {"AT_ONCE": at_once}) == [ENDED] * 2


def aborts_twice(rank: Rank) -> None:
    """A second abort does nothing."""
    dist.barrier()
    for _ in range(2):
        rank.backend.abort([everyone()])
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("program", "variables"),
    [(works_in_other_groups, SILENT | {settings.ABORT_S: "2"}), (aborts_twice, SILENT)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_rank_lives_on(program: Callable[[Rank], None], variables: dict[str, str], tmp_path: Path) -> None:
    assert run(program, 1, tmp_path, variables) == [ENDED]
