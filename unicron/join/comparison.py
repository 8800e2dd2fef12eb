"""The comparison of a generation's members, which newcomers have to pass.

It has three parts. A newcomer that fails one leaves before anything of it has entered a checkpoint or a copy in memory:

    as they join            code, settings, data and library versions, by a digest in the reports of the members
    before the first update the hyperparameters of the optimizers, which a loop may set until then
    behind that update      the parameters, among the ranks that have the same ones; the update is undone if they differ

Each costs one small gather in a generation. Only where digests differ do the members exchange what they stand for. All
evaluate the same functions on it (``unicron.join.identity``), so the one that differs knows in what, and the others
know that it leaves. They leave the generation as if its sockets had broken.

The hyperparameters with which an optimizer would apply an update now are fields of an identity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from unicron import device
from unicron.errors import MemberDiffers, PeerDiffers
from unicron.join.identity import Difference, Identity, described, differing, digest, signature
from unicron.link.waiting import Wait
from unicron.megatron.optimizer import OF_PEERS, torch_optimizers
from unicron.megatron.parallel import data_group, model_coordinate
from unicron.state import transfer
from unicron.state.rank_state import RankState
from unicron.state.tensors import LocalShard

ROUNDING = 64
"""Distances between neighbouring numbers, at the size of a tensor's largest value, by which parameters may differ
behind one update with the same gradients: kernels for other processors round in another order."""


COUNTS = frozenset({"step"})
"""Names of values that some optimizers count in a group; these belong to the state, which moves
(``unicron.megatron.optimizer``)."""


def hyperparameters(optimizer: Any, shard: tuple[int, int], shards: int) -> Identity:
    """Return the hyperparameters of a rank's optimizer.

    A hyperparameter that is the same in all groups has one field, which all ranks have in common. Any other has a field
    for each group, which ranks of other model shards do not have: their optimizers may have other groups.

    Args:
        optimizer: torch's, or Megatron's around it.
        shard: the rank's tensor- and pipeline-parallel rank.
        shards: the number of shards of the model.
    """
    # Empty groups that are there since other ranks have them are left out: a new process has none yet.
    groups = [group for one in torch_optimizers(optimizer) for group in one.param_groups if OF_PEERS not in group]
    values = [dict(_values(group)) for group in groups]
    names = sorted({name for of_group in values for name in of_group})
    where = f" of tensor rank {shard[0]}, stage {shard[1]}" if shards > 1 else ""
    fields = {"optimizer/class": ", ".join(type(one).__name__ for one in torch_optimizers(optimizer))}
    for name in names:
        if len({of_group.get(name) for of_group in values}) == 1:
            fields[f"optimizer/{name}"] = values[0][name]
            continue
        for number, of_group in enumerate(values):
            if name in of_group:
                fields[f"optimizer/{name} of group {number}{where}"] = of_group[name]
    return fields


def _values(group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the hyperparameters of a group that are plain values, as text."""
    for name, value in group.items():
        if name in COUNTS:
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if _is_plain(value) or (isinstance(value, tuple | list) and name != "params" and all(map(_is_plain, value))):
            yield name, repr(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """What a rank knows of a generation's members when it has joined."""

    proven: Collection[int]
    """The ranks that have trained in a generation before, and so have passed a comparison."""
    shards: int = 1
    """Number of shards of the model."""
    recorded: Identity = field(default_factory=dict)
    """What the log has recorded of the task."""


def check_identities(digests: Sequence[int], own: Callable[[], Identity], members: Members, wait: Wait) -> None:
    """Compare what the members are as they join. All members call it.

    Args:
        digests: of the identities of all members, by rank.
        own: returns this rank's identity.
        members: the generation's.
        wait: waits for a collective.

    Raises:
        MemberDiffers: this rank is not what the others are.
        PeerDiffers: another rank is not, and leaves.
        RuntimeError: a member was lost meanwhile.
    """
    expected = {digest(members.recorded)} if members.recorded and not members.proven else set()
    if len(expected.union(digests)) == 1:
        return
    identities: list[Identity] = transfer.gather(dict(own()), wait)
    newcomers = set(range(len(digests))).difference(members.proven)
    _leave(differing(identities, members.proven, members.recorded, judged=newcomers), members)


def check_hyperparameters(rank_state: RankState, members: Members, wait: Wait) -> None:
    """Compare the hyperparameters with which all members are about to apply an update. All members call it.

    Raises:
        MemberDiffers, PeerDiffers, RuntimeError: as ``check_identities``. The sums of the step are then not to be used:
            the member that differs may have had a part in them.
    """
    own = hyperparameters(rank_state.optimizer, model_coordinate(), members.shards)
    mine = torch.tensor([digest(own)], dtype=torch.int64, device=device.current())
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    wait(dist.all_gather(gathered, mine, async_op=True))
    if len({int(one) for one in torch.cat(gathered).tolist()}) == 1:
        return
    identities: list[Identity] = transfer.gather(dict(own), wait)
    _leave(differing(identities, members.proven, {}, judged=range(len(identities))), members)


def check_parameters(rank_state: RankState, members: Members, wait: Wait) -> None:
    """Compare the parameters, once the first update of a generation is applied. All members call it.

    Raises:
        MemberDiffers, PeerDiffers, RuntimeError: as ``check_identities``. The update is to be undone if a member
            differs, since that member had a part in it.
    """
    trained = [local for local in rank_state.tensors.local_shards if local.is_trained]
    mine = torch.stack([_bits(trained), torch.tensor(_number(model_coordinate()), device=device.current())])
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    wait(dist.all_gather(gathered, mine, async_op=True))
    rows = [tuple(row) for row in torch.stack(gathered).tolist()]
    if len(set(rows)) == len({shard for _, shard in rows}):
        return
    # Only ranks of a shard whose digests differ have to look for the difference; all ranks wait for what they find.
    mixed = len({bits for bits, shard in rows if shard == rows[dist.get_rank()][1]}) > 1
    found = _different_parameters(trained, members, wait) if mixed else []
    all_found: list[list[Difference]] = transfer.gather(found, wait)
    _leave({rank: one for rank, one in enumerate(all_found) if one}, members)


def _number(coordinate: tuple[int, int]) -> int:
    return coordinate[0] << 32 | coordinate[1]


def _bits(trained: Sequence[LocalShard]) -> torch.Tensor:
    """Return a number that differs where the bits of parameters do, on the device: one pass over the parameters."""
    sums = [torch.zeros((), dtype=torch.int64, device=device.current())]
    for local in trained:
        values = local.weights
        as_integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(values.element_size(), torch.uint8)
        sums.append(values.reshape(-1).view(as_integer).sum(dtype=torch.int64).to(device.current()))
    weights = torch.arange(1, 2 * len(sums), 2, dtype=torch.int64, device=device.current())
    return (torch.stack(sums) * weights).sum()


def _different_parameters(trained: Sequence[LocalShard], members: Members, wait: Wait) -> list[Difference]:
    """Return the parameters of this rank that are not those of the lowest proven rank with the same shard.

    They are sent one after the other: digests cannot tell another learning rate from another order of rounding.
    """
    group = data_group()
    ranks = dist.get_process_group_ranks(group)
    source = next((rank for rank in ranks if rank in members.proven), ranks[0])
    found = []
    for local in trained:
        theirs = local.weights.detach().clone().contiguous()
        wait(dist.broadcast(theirs, src=source, group=group, async_op=True))
        apart = (local.weights.double() - theirs.double()).abs()
        largest = float(apart.max()) if apart.numel() else 0.0
        size = float(theirs.double().abs().max()) if apart.numel() else 0.0
        if not largest <= ROUNDING * torch.finfo(theirs.dtype).eps * size:
            where = int(apart.nan_to_num(float("inf")).argmax())
            own, expected = (float(one.reshape(-1)[where]) for one in (local.weights, theirs))
            found.append(Difference(f"parameter/{local.shard.name}[{where}]", f"{own:.9g}", f"{expected:.9g}"))
    return found


def _leave(found: dict[int, list[Difference]], members: Members) -> None:
    """Leave the generation if a member differs.

    Raises:
        MemberDiffers: this rank differs. PeerDiffers: another rank differs.
    """
    if not found:
        return
    rank = dist.get_rank()
    if rank in found:
        others = [one for one in range(dist.get_world_size()) if one not in found]
        proven = [one for one in others if one in members.proven]
        where = f"on rank {(proven or others)[0]}" if others else "in what the log has recorded"
        if members.recorded and not members.proven:
            where = "in what the log has recorded"
        raise MemberDiffers(described(found[rank], "here", where), signature(found[rank]))
    first = min(found)
    raise PeerDiffers(f"rank {first} differs, and leaves: {described(found[first], 'there', 'here')}")
