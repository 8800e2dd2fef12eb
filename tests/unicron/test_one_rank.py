"""A group of one rank: what it does is done at once, and no communicator is made for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unicron.contract import communicator, settings
from tests.unicron.contract.ranks import End, Rank, run
from unicron.link import issuing

pytestmark = pytest.mark.timeout(60)

QUICK = {settings.MODE: "sockets", settings.MAKE_S: "0.01", settings.ABORT_S: "0.02"}


def every_operation(rank: Rank) -> None:
    group: Any = dist.group.WORLD
    issuing.guard([group])
    values = torch.arange(3.0)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        dist.all_reduce(values, op=op)
    dist.broadcast(values, src=0)
    dist.reduce(values, dst=0)
    work = dist.all_reduce(values, async_op=True)
    assert work is not None
    assert (work.wait(), work.is_completed()) == (True, True)
    assert values.tolist() == [0.0, 1.0, 2.0]
    outputs = [torch.empty(3) for _ in range(7)]
    dist.all_gather_single(outputs[0].view(1, 3), values)
    dist.reduce_scatter_single(outputs[1], values)
    dist.all_to_all_single(outputs[2], values, [3], [3])
    dist.all_gather([outputs[3]], values)
    dist.reduce_scatter(outputs[4], [values])
    dist.all_to_all([outputs[5]], [values])
    dist.gather(values, [outputs[6]], dst=0)
    dist.barrier()
    assert [one.tolist() for one in outputs] == [[0.0, 1.0, 2.0]] * 7
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as both:
        dist.all_reduce(values)
        dist.all_reduce(outputs[0])
    both.wait()
    objects: list[Any] = [None]
    dist.all_gather_object(objects, "mine")
    assert objects == ["mine"]
    assert list(communicator.everything) == []


def test_every_operation_is_done_without_a_communicator(tmp_path: Path) -> None:
    assert run(every_operation, 1, tmp_path, QUICK) == [End(0, "")]


def test_what_it_does_not_know_is_left_to_the_backend() -> None:
    assert issuing.perform("send", [[torch.ones(1)], 0, 0], {}) is None


def test_a_sum_of_multiples_is_left_to_the_backend() -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist._make_nccl_premul_sum(2.0)
    assert issuing.perform("allreduce", [[torch.ones(1)], options], {}) is None


def test_one_issued_on_another_stream_has_the_waiting_one_wait_for_it() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    values = torch.zeros(1 << 24, device="cuda")
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(64):
            values += 1
        work = issuing.perform("allreduce", [[values]], {})
    assert work is not None
    work.wait()
    assert int(values.sum()) == 64 << 24
