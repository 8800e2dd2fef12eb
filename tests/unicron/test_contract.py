"""The contract backend itself: each rule is seen, and who breaks one is told so."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.condition import until_blocking
from tests.unicron.contract import bootstrap, communicator, settings
from tests.unicron.contract.backend import Contract
from tests.unicron.contract.communicator import Communicator, State
from tests.unicron.contract.ranks import End, Rank, run
from tests.unicron.contract.settings import Settings
from tests.unicron.contract.watchdog import TorchSettings
from unicron import backend
from unicron.process import sockets

pytestmark = pytest.mark.timeout(60)

QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Torch's watchdog and monitor do nothing."""
SOCKETS = {settings.MODE: "sockets", settings.MAKE_S: "0.01", settings.ABORT_S: "0.02", settings.NOTICE_S: "0.05"}
SILENT = SOCKETS | {settings.MODE: "silent"}
KILLED = End(-1, "")
ENDED = End(0, "")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def everyone() -> Any:
    """Return the default group."""
    return dist.group.WORLD


def only_communicator() -> Communicator:
    (found,) = communicator.everything
    return found


def is_broken(one: Communicator) -> bool:
    return one._broken_at_s is not None


# Collectives.


def every_operation(rank: Rank) -> None:
    """Every operation does what it should."""
    mine, size = float(rank.number), rank.size
    ones = torch.ones(2)
    total = torch.full((3,), mine)
    dist.all_reduce(total)
    assert total.tolist() == [3.0] * 3
    mean = torch.full((1,), mine)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    largest = torch.full((1,), rank.number)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert (mean.item(), largest.item()) == (1.0, 2)
    reduced = torch.full((1,), mine)
    dist.reduce(reduced, dst=1)
    assert reduced.item() == (3.0 if rank.number == 1 else mine)
    sent = torch.full((2,), mine)
    dist.broadcast(sent, src=2)
    assert sent.tolist() == [2.0, 2.0]
    gathered = [torch.empty(2) for _ in range(size)]
    dist.all_gather(gathered, ones * mine)
    assert [one.tolist() for one in gathered] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    whole = torch.empty(size, 2)
    dist.all_gather_single(whole, ones * mine)
    assert whole.tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    own = torch.empty(1)
    dist.reduce_scatter_single(own, torch.arange(3.0) + mine)
    assert own.item() == 3.0 * mine + 3.0
    dist.reduce_scatter(own, [torch.full((1,), k + mine) for k in range(size)])
    assert own.item() == 3.0 * mine + 3.0
    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, torch.arange(3.0) + 10 * mine)
    assert swapped.tolist() == [mine, 10 + mine, 20 + mine]
    uneven = torch.empty(size * rank.number)
    dist.all_to_all_single(uneven, torch.arange(3.0), [rank.number] * size, [0, 1, 2])
    assert uneven.tolist() == [[], [0.0] * 3, [1.0, 2.0] * 3][rank.number]
    lists = [torch.empty(1) for _ in range(size)]
    dist.all_to_all(lists, [torch.full((1,), mine) for _ in range(size)])
    assert [one.item() for one in lists] == [0.0, 1.0, 2.0]
    dist.gather(ones * mine, gathered if rank.number == 0 else None, dst=0)
    dist.scatter(ones, gathered if rank.number == 0 else None, src=0)
    assert ones.tolist() == [mine] * 2
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank.number})
    assert [one["rank"] for one in objects] == [0, 1, 2]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as both:
        first, second = torch.full((1,), mine), torch.full((2,), mine)
        dist.all_reduce(first)
        dist.all_reduce(second)
    both.wait()
    assert (first.item(), second.tolist()) == (3.0, [3.0, 3.0])
    dist.barrier()
    if rank.number < 2:
        peer, large = 1 - rank.number, torch.full((1 << 20,), mine)
        received = torch.empty_like(large)
        operations = [dist.P2POp(dist.isend, large, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert received[-1].item() == peer
        if rank.number == 0:
            dist.send(torch.full((1,), 7.0), 1)
        else:
            dist.recv(first, 0)
            assert first.item() == 7.0
    rank.backend.synchronize()
    dist.destroy_process_group()


def returns_before_it_is_done(rank: Rank) -> None:
    """A collective returns before it is done."""
    dist.barrier()
    values = torch.ones(1)
    if rank.number == 0:
        work: Any = dist.all_reduce(values, async_op=True)
        assert not work.is_completed()
        assert rank.backend.mark().is_reached(), "nothing that the stream has waited for is left"
        rank.signals.set("issued", "1")
        work.wait()
        assert work.is_completed()
    else:
        rank.signals.wait(["issued"])
        dist.all_reduce(values)
    assert values.item() == 2.0


def is_undefined_meanwhile(rank: Rank) -> None:
    """What is received is undefined until it is waited for."""
    dist.barrier()
    if rank.number == 1:
        rank.signals.wait(["seen"])
    values = torch.ones(1)
    work: Any = dist.all_reduce(values, async_op=True)
    if rank.number == 0:
        until_blocking(lambda: values.isnan().all())
        rank.signals.set("seen", "1")
    work.wait()
    assert values.item() == 2.0


# A peer that dies.


def dies(rank: Rank) -> None:
    """A peer dies, and the other is aborted: it gets garbage, and no error."""
    dist.barrier()
    if rank.number == 1:
        rank.signals.wait(["issued"])
        killed()
    floats, integers = torch.ones(2), torch.ones(2, dtype=torch.int64)
    whole = torch.zeros(4)
    own = whole[:2].fill_(5.0)
    kept = torch.full((2,), 3.0)
    works: list[Any] = [
        dist.all_reduce(floats, async_op=True),
        dist.all_reduce(integers, async_op=True),
        dist.all_gather_single(whole, own, async_op=True),
        dist.broadcast(kept, src=0, async_op=True),
    ]
    rank.signals.set("issued", "1")
    until_blocking(lambda: is_broken(only_communicator()))
    if os.environ[settings.MODE] == "silent":
        assert not any(work.is_completed() for work in works)
    ended = threading.Thread(target=works[0].wait)
    ended.start()
    rank.backend.abort([everyone()])
    ended.join()
    for work in works:
        assert work.wait()
        assert work.is_completed()
    assert floats.isnan().all()
    assert integers.tolist() == [0x5A5A5A5A5A5A5A5A] * 2
    assert whole[:2].tolist() == [5.0, 5.0], "NCCL leaves the own part of a gather in place alone"
    assert whole[2:].isnan().all()
    assert kept.tolist() == [3.0, 3.0], "and what the root of a broadcast sends"
    rank.backend.synchronize()
    with pytest.raises(dist.DistBackendError, match="was aborted"):
        dist.all_reduce(floats)
    dist.destroy_process_group()


def lags(rank: Rank) -> None:
    """The host may be ahead of the device."""
    mark = rank.backend.mark()
    assert not mark.is_reached()
    rank.backend.synchronize()
    assert mark.is_reached()


@pytest.mark.parametrize("variables", [SOCKETS, SILENT], ids=str)
def test_an_abort_ends_collectives_without_an_error_and_with_garbage(variables: dict[str, str], tmp_path: Path) -> None:
    assert run(dies, 2, tmp_path, variables | QUIET) == [ENDED, KILLED]


def asks_for_the_error(rank: Rank) -> None:
    """Who asks whether a collective has ended may find an error. Over sockets: the wait behind it then aborts and
    raises."""
    dist.barrier()
    if rank.number == 1:
        killed()
    work: Any = dist.all_reduce(torch.ones(1), async_op=True)
    until_blocking(work.is_completed)
    assert not work.is_success()
    with pytest.raises(dist.DistBackendError):
        work.wait()
    assert not only_communicator().is_open
    dist.destroy_process_group()


def issues_behind_a_death(rank: Rank) -> None:
    """What is issued behind a peer's death fails and what was issued before hangs."""
    dist.barrier()
    if rank.number == 1:
        killed()
    dist.all_reduce(torch.ones(1), async_op=True)
    until_blocking(only_communicator().has_error)
    with pytest.raises(dist.DistBackendError, match="remote process exited"):
        dist.all_reduce(torch.ones(1), async_op=True)
    assert only_communicator().pending()


def ends_behind_a_barrier(rank: Rank) -> None:
    """The last part of a barrier is lost with the process."""
    work: Any = dist.barrier(async_op=True)
    if rank.number == 0:
        work.wait()
        killed()
    until_blocking(lambda: is_broken(only_communicator()))
    assert not work.is_completed()


def asks_during_an_abort(rank: Rank) -> None:
    """Who asks during an abort finds the error that the abort sets."""
    dist.barrier()
    if rank.number == 1:
        rank.signals.wait(["done"])
        return
    work: Any = dist.all_reduce(torch.ones(1), async_op=True)
    aborting = threading.Thread(target=rank.backend.abort, args=([everyone()],))
    aborting.start()
    until_blocking(lambda: only_communicator()._state is State.ABORTING)
    assert work.is_completed()
    assert work.exception() is not None
    with pytest.raises(dist.DistBackendError):
        work.wait()
    aborting.join()
    rank.signals.set("done", "1")


def waits_for_a_time(rank: Rank) -> None:
    work: Any = dist.barrier(async_op=True)
    work.wait(timedelta(seconds=1))


def test_a_wait_in_slices_breaks_a_rule(tmp_path: Path) -> None:
    (end,) = run(waits_for_a_time, 1, tmp_path, SILENT)
    assert end.rule.startswith("a wait with a time-out aborts the communicator")


# The making of communicators.


def makes_communicators_when_they_are_needed(rank: Rank) -> None:
    """Communicators are made when they are needed. One for a group; for sends beside one another, one for two ranks,
    unless the group's is connected."""
    group = dist.new_group([0, 1])
    assert not communicator.everything
    dist.barrier()
    assert [one.name for one in communicator.everything] == ["0/collectives"]
    other: Any = dist.isend(torch.ones(1), 1, group) if rank.number == 0 else dist.irecv(torch.ones(1), 0, group)
    assert {one.name for one in communicator.everything} == {"0/collectives", "1/0:1"}
    other.wait()
    rank.backend.connect(group)
    assert {one.name for one in communicator.everything} == {"0/collectives", "1/0:1", "1/collectives"}
    eager = dist.new_group([0, 1])
    rank.backend.connect(eager)
    other = dist.isend(torch.ones(1), 1, eager) if rank.number == 0 else dist.irecv(torch.ones(1), 0, eager)
    other.wait()
    assert {one.name for one in communicator.everything} - {"0/collectives", "1/0:1", "1/collectives"} == {
        "2/collectives"
    }
    dist.destroy_process_group()


def waits_for_a_peer(rank: Rank) -> None:
    """Only a shut socket ends the making of a communicator."""
    if rank.number == 1:
        rank.signals.wait(["done"])
        return
    before, listening = sockets.connected(), sockets.listening()
    failed: list[BaseException] = []

    def make() -> None:
        try:
            rank.backend.connect(everyone())
        except dist.DistBackendError as error:
            failed.append(error)

    is_waiting, is_let_in = threading.Event(), bootstrap._is_let_in

    def announce(*arguments: Any) -> bool:
        is_waiting.set()
        return is_let_in(*arguments)

    replaced: Any = bootstrap
    replaced._is_let_in = announce
    making = threading.Thread(target=make)
    making.start()
    is_waiting.wait()
    sockets.impersonate_peers(lambda inode: inode not in listening, rank.size)
    sockets.shut(lambda inode: inode not in before)
    making.join(0.3)
    assert making.is_alive(), "only a listening socket holds the rank"
    for inode, one in sockets._tcp_sockets(listening=True):
        if inode not in listening:
            one.shutdown(socket.SHUT_RDWR)
    making.join()
    assert failed
    assert not communicator.everything
    rank.signals.set("done", "1")


def is_made_in_an_aborted_group(rank: Rank) -> None:
    group = dist.new_group([0])
    rank.backend.abort([group])
    dist.barrier(group)


def test_no_communicator_is_made_in_an_aborted_group(tmp_path: Path) -> None:
    (end,) = run(is_made_in_an_aborted_group, 1, tmp_path, SILENT)
    assert end.rule.startswith("a communicator is made in a group that is aborted")


# Destruction.


def destroys_with(rank: Rank) -> None:
    """A peer dies; the survivor's watchdog sees it; then the group is aborted and destroyed."""
    dist.barrier()
    if rank.number == 1:
        killed()
    work: Any = dist.all_reduce(torch.ones(1), async_op=True)
    group = everyone()
    until_blocking(lambda: only_communicator().has_error())
    until_blocking(lambda: group.watchdog._threads)
    until_blocking(lambda: group.watchdog.works.locked() or not float(os.environ["EXPECTED_S"]))
    rank.backend.abort([group])
    work.wait()
    began_s = time.monotonic()
    dist.destroy_process_group()
    took_s = time.monotonic() - began_s
    assert took_s >= float(os.environ["EXPECTED_S"]), took_s


@pytest.mark.parametrize(
    "variables",
    [
        QUIET | {"EXPECTED_S": "0"},
        # The watchdog sleeps for a minute, here a second and a half, whether there is a dump or not.
        {k: v for k, v in QUIET.items() if "WAIT_TIMEOUT" not in k} | {"EXPECTED_S": "0.5"},
    ],
    ids=["quiet", "dump"],
)
def test_a_destruction_waits_for_the_watchdog(variables: dict[str, str], tmp_path: Path) -> None:
    slow = SOCKETS | {settings.TIME_SCALE: "0.025"} | variables
    assert run(destroys_with, 2, tmp_path, slow) == [ENDED, KILLED]


def lives_on(rank: Rank) -> None:
    """A peer dies. The survivor leaves its group as it is, for three heartbeats of the monitor."""
    dist.barrier()
    if rank.number == 1:
        killed()
    work: Any = dist.all_reduce(torch.ones(1), async_op=True)
    until_blocking(lambda: is_broken(only_communicator()))
    time.sleep(3 * 10 * float(os.environ[settings.TIME_SCALE]))
    assert work.outcome.name == "PENDING"
    rank.backend.abort([everyone()])
    dist.destroy_process_group()


HEARTBEAT = SOCKETS | {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10", settings.TIME_SCALE: "0.02"}


def without(*names: str) -> dict[str, str]:
    return HEARTBEAT | {name: value for name, value in QUIET.items() if not any(part in name for part in names)}


@pytest.mark.parametrize(
    ("variables", "rule"),
    [
        (without("DUMP_ON_TIMEOUT", "MONITORING"), "the heartbeat monitor ends the process"),
        (without("WAIT_TIMEOUT", "MONITORING"), "the heartbeat monitor ends the process"),
        (without("ASYNC_ERROR", "RETHROW"), "the watchdog throws"),
        (without() | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "the watchdog aborts"),
        (without("RETHROW") | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "the watchdog throws"),
    ],
    ids=["dump", "stuck", "throws", "aborts", "detail"],
)
def test_where_they_are_on_the_survivor_ends(variables: dict[str, str], rule: str, tmp_path: Path) -> None:
    survivor, _ = run(lives_on, 2, tmp_path, variables)
    assert survivor.rule.startswith(rule)


def destroys_what_hangs(rank: Rank) -> None:
    """A destruction waits for what hangs."""
    dist.barrier()
    if rank.number == 1:
        rank.signals.wait(["done"])
        return
    work: Any = dist.all_reduce(torch.ones(1), async_op=True)
    destroying = threading.Thread(target=partial(dist.destroy_process_group, everyone()), daemon=True)
    destroying.start()
    destroying.join(0.3)
    assert destroying.is_alive()
    assert not work.is_completed()
    rank.signals.set("done", "1")


def drops_everything(rank: Rank) -> None:
    """Destructors do not hang."""
    dist.barrier()
    if rank.number == 1:
        killed()
    until_blocking(lambda: not only_communicator().pending())
    group = dist.new_group([0])
    dist.barrier(group)
    works: list[Any] = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]
    until_blocking(lambda: is_broken(next(one for one in communicator.everything if one.name == "0/collectives")))
    del group
    works.clear()
    world: Any = dist.distributed_c10d._world
    for one in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        getattr(world, one).clear()
    dist.distributed_c10d._update_default_pg(None)
    torch._C._distributed_c10d._unregister_all_process_groups()
    gc.collect()
    until_blocking(lambda: not any(thread.name.startswith("contract 0/") for thread in threading.enumerate()))


def destroys_alone(rank: Rank) -> None:
    """A destruction may wait for all ranks."""
    dist.barrier()
    if rank.number == 1:
        rank.signals.wait(["done"])
        return
    destroying = threading.Thread(target=dist.destroy_process_group, daemon=True)
    destroying.start()
    destroying.join(0.3)
    assert destroying.is_alive()
    rank.signals.set("done", "1")


# What becomes of each rank.


@pytest.mark.parametrize(
    ("program", "variables", "ends"),
    [
        (every_operation, SOCKETS, [ENDED] * 3),
        (returns_before_it_is_done, SILENT, [ENDED] * 2),
        (is_undefined_meanwhile, SILENT, [ENDED] * 2),
        (lags, SILENT | {settings.LAG_S: "0.3"}, [ENDED]),
        (asks_for_the_error, SOCKETS | QUIET, [ENDED, KILLED]),
        (issues_behind_a_death, SOCKETS | QUIET, [ENDED, KILLED]),
        (ends_behind_a_barrier, SILENT | QUIET | {settings.LEAVES_S: "5"}, [KILLED, ENDED]),
        (asks_during_an_abort, SILENT | {settings.ABORT_S: "0.6"}, [ENDED] * 2),
        (makes_communicators_when_they_are_needed, SILENT, [ENDED] * 2),
        (waits_for_a_peer, SILENT, [ENDED] * 2),
        (lives_on, without(), [ENDED, KILLED]),
        (destroys_what_hangs, SILENT, [ENDED] * 2),
        (drops_everything, SOCKETS | QUIET, [ENDED, KILLED]),
        (destroys_alone, SILENT | {settings.DESTROY_MEETS: "1"}, [ENDED] * 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_rank_ends_as_it_should(
    program: Callable[[Rank], None], variables: dict[str, str], ends: list[End], tmp_path: Path
) -> None:
    assert run(program, len(ends), tmp_path, variables) == ends


# Settings.


def test_the_environment_says_whether_and_how() -> None:
    assert Settings.of_environment({}) is None
    assert Settings.of_environment({settings.MODE: "sockets"}) == Settings()
    assert Settings.of_environment({settings.MODE: "silent", settings.MAKE_S: "0.2"}) == Settings(
        mode="silent", make_s=0.2
    )
    with pytest.raises(ValueError, match="loud"):
        Settings.of_environment({settings.MODE: "loud"})


def test_torchs_defaults() -> None:
    assert TorchSettings.of_environment({}) == TorchSettings(
        dumps=True, monitors=True, handling=3, rethrows=True, heartbeat_s=480.0, dump_s=60.0
    )


def test_what_the_product_sees_of_it() -> None:
    assert (Contract.aborts, Contract.waits_in_slices, Contract.scatters) == (True, False, True)
    assert {name for name in dir(backend.Backend) if not name.startswith("_")} <= set(dir(Contract))
