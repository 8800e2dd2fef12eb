"""What each collective of the contract backend reads, writes and has gloo do.

Sums are added up in the order of ranks, where gloo does not do it: a failure-free run on gloo has the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.unicron.contract.work import Operation

BROADCAST, ALLREDUCE, REDUCE, ALLGATHER, GATHER, SCATTER, REDUCE_SCATTER = 0, 1, 3, 4, 7, 8, 9
ALLTOALL_BASE, ALLTOALL, SEND, RECEIVE, BARRIER, COALESCED = 10, 11, 12, 13, 15, 17
"""Torch's ``OpType``."""

Tensors = Sequence[torch.Tensor]

NEVER = timedelta(days=1)
"""NCCL has no time-out of its own."""

# Before anything replaces it for gloo's work: ``unicron.join.groups`` does.
_torch_wait = dist.Work.wait


def _wait(work: Any) -> None:
    _torch_wait(work, NEVER)


def all_reduce(tensors: Tensors, op: Any) -> Operation:
    def perform(gloo: Any, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        for tensor in copies:
            _all_reduce(gloo, tensor, op)
        return copies

    return Operation("all_reduce", ALLREDUCE, tensors, tensors, perform)


def _all_reduce(gloo: Any, tensor: torch.Tensor, op: Any) -> None:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
    _wait(gloo.allreduce([tensor], options))
    if op == dist.ReduceOp.AVG:
        tensor /= gloo.size()


def broadcast(tensor: torch.Tensor, root: int, rank: int) -> Operation:
    def perform(gloo: Any, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        _wait(gloo.broadcast(copies, options))
        return [] if rank == root else copies

    return Operation("broadcast", BROADCAST, [tensor], [] if rank == root else [tensor], perform)


def reduce(tensor: torch.Tensor, root: int, rank: int, op: Any) -> Operation:
    def perform(gloo: Any, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        _all_reduce(gloo, copies[0], op)
        return copies if rank == root else []

    return Operation("reduce", REDUCE, [tensor], [tensor] if rank == root else [], perform)


def all_gather(outputs: Tensors, own: torch.Tensor) -> Operation:
    written = [not _same(output, own) for output in outputs]

    def perform(gloo: Any, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        gathered = [torch.empty_like(copies[0]) for _ in outputs]
        _wait(gloo.allgather([gathered], copies))
        return [one for one, is_written in zip(gathered, written, strict=True) if is_written]

    writes = [one for one, is_written in zip(outputs, written, strict=True) if is_written]
    return Operation("all_gather", ALLGATHER, [own], writes, perform)


def all_gather_single(output: torch.Tensor, own: torch.Tensor, size: int) -> Operation:
    parts = output.data.view(-1).view(size, own.numel())
    return all_gather([part.view(own.shape) for part in parts], own)


def reduce_scatter(output: torch.Tensor, inputs: Tensors, op: Any) -> Operation:
    def perform(gloo: Any, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        return [_reduce_scatter(gloo, torch.cat([copy.view(-1) for copy in copies]), op)]

    return Operation("reduce_scatter", REDUCE_SCATTER, inputs, [output], perform)


def reduce_scatter_single(output: torch.Tensor, whole: torch.Tensor, size: int, op: Any) -> Operation:
    assert whole.numel() == output.numel() * size
    return reduce_scatter(output, [whole], op)


def _reduce_scatter(gloo: Any, whole: torch.Tensor, op: Any) -> torch.Tensor:
    received = torch.empty_like(whole)
    _wait(gloo.alltoall_base(received, whole, [], [], dist.AllToAllOptions()))
    parts = received.chunk(gloo.size())
    total = parts[0].clone()
    for part in parts[1:]:
        if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            total += part
        elif op == dist.ReduceOp.MAX:
            total = torch.maximum(total, part)
        elif op == dist.ReduceOp.MIN:
            total = torch.minimum(total, part)
        else:
            raise NotImplementedError(f"reduce_scatter with {op}")
    return total / gloo.size() if op == dist.ReduceOp.AVG else total


def all_to_all_single(
    output: torch.Tensor, whole: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], size: int
) -> Operation:
    def perform(gloo: Any, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        received = torch.empty_like(output.data)
        options = dist.AllToAllOptions()
        _wait(gloo.alltoall_base(received, copies[0], list(output_sizes), list(input_sizes), options))
        return [received]

    return Operation("all_to_all_single", ALLTOALL_BASE, [whole], [output], perform)


def all_to_all(outputs: Tensors, inputs: Tensors) -> Operation:
    def perform(gloo: Any, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        received = torch.empty(sum(output.numel() for output in outputs), dtype=copies[0].dtype)
        sizes = [output.numel() for output in outputs], [copy.numel() for copy in copies]
        flat = torch.cat([copy.view(-1) for copy in copies])
        _wait(gloo.alltoall_base(received, flat, *sizes, dist.AllToAllOptions()))
        return list(torch.split(received, sizes[0]))

    return Operation("all_to_all", ALLTOALL, inputs, outputs, perform)


def gather(outputs: Tensors, own: torch.Tensor, root: int, rank: int) -> Operation:
    def perform(gloo: Any, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        options = dist.GatherOptions()
        options.rootRank = root
        gathered = [torch.empty_like(copies[0]) for _ in range(gloo.size())] if rank == root else []
        _wait(gloo.gather([gathered] if rank == root else [], copies, options))
        return gathered

    return Operation("gather", GATHER, [own], outputs if rank == root else [], perform)


def scatter(output: torch.Tensor, inputs: Tensors, root: int, rank: int) -> Operation:
    def perform(gloo: Any, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        options = dist.ScatterOptions()
        options.rootRank = root
        received = torch.empty_like(output.data)
        _wait(gloo.scatter([received], [copies] if rank == root else [], options))
        return [received]

    return Operation("scatter", SCATTER, inputs if rank == root else [], [output], perform)


def meeting() -> Operation:
    """Return a collective that ends once all ranks have come."""

    def perform(gloo: Any, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        _all_reduce(gloo, torch.zeros(1), dist.ReduceOp.SUM)
        return []

    return Operation("barrier", BARRIER, [], [], perform)


def barrier(leaves_s: float) -> Operation:
    """ProcessGroupNCCL.cpp, ``barrier``: an all-reduce of one number.

    It ends on rank 0 first. What the others wait for is still in its process then, and is lost if the process ends
    (nccl: src/transport/net.cc, ``sendProxyProgress``; seen on a device: docs/measured-gpu.md). The same holds of the
    last part of any collective; it is barriers that programs end behind.

    Args:
        leaves_s: how long that takes to leave.
    """

    def perform(gloo: Any, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        _all_reduce(gloo, torch.zeros(1), dist.ReduceOp.SUM)
        if gloo.rank() > 0:
            _wait(gloo.recv([torch.zeros(1)], 0, 0))
        return []

    def send_the_rest(gloo: Any) -> None:
        if gloo.rank() == 0:
            time.sleep(leaves_s)
            for peer in range(1, gloo.size()):
                _wait(gloo.send([torch.zeros(1)], peer, 0))

    return Operation("barrier", BARRIER, [], [], perform, afterwards=send_the_rest) if leaves_s else meeting()


def send(tensor: torch.Tensor, peer: int) -> Operation:
    return _exchange([Operation("send", SEND, [tensor], [], _unused, peer)])


def receive(tensor: torch.Tensor, peer: int) -> Operation:
    return _exchange([Operation("receive", RECEIVE, [], [tensor], _unused, peer)])


def coalesced(operations: Sequence[Operation]) -> Operation:
    """Return what is done as one (NCCL: ``ncclGroupStart``, ``ncclGroupEnd``)."""
    if all(one.number in (SEND, RECEIVE) for one in operations):
        return _exchange(operations)

    def perform(gloo: Any, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        start = 0
        for one in operations:
            results += one.perform(gloo, copies[start : start + len(one.reads)])
            start += len(one.reads)
        return results

    reads = [tensor for one in operations for tensor in one.reads]
    writes = [tensor for one in operations for tensor in one.writes]
    return Operation("coalesced", COALESCED, reads, writes, perform)


def _exchange(operations: Sequence[Operation]) -> Operation:
    """Return sends and receives that are under way together: gloo's send ends once the peer receives."""

    def perform(gloo: Any, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        sent, received, works = iter(copies), [], []
        for one in operations:
            if one.number == SEND:
                works.append(gloo.send([next(sent)], one.peer, 0))
            else:
                received.append(torch.empty_like(one.writes[0].data, memory_format=torch.contiguous_format))
                works.append(gloo.recv([received[-1]], one.peer, 0))
        for work in works:
            _wait(work)
        return received

    reads = [tensor for one in operations for tensor in one.reads]
    writes = [tensor for one in operations for tensor in one.writes]
    (number,) = {one.number for one in operations} if len(operations) == 1 else {COALESCED}
    name = operations[0].name if len(operations) == 1 else "batch_isend_irecv"
    peer = operations[0].peer if len(operations) == 1 else -1
    return Operation(name, number, reads, writes, perform, peer)


def _unused(gloo: Any, copies: list[torch.Tensor]) -> list[torch.Tensor]:
    raise NotImplementedError


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()
