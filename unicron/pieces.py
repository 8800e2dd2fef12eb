"""The state a rank holds as named pieces of global tensors, the same names in every layout.

A *piece* is a rectangular shard of a global tensor (tensor and pipeline parallelism cut tensors and layers) or, with
Megatron's distributed optimizer, a flat range of such a shard. Whoever holds the same piece at the same step holds the
same numbers, whatever layout it trains in; ``unicron.moves`` plans who gives what to whom.

Keys: ``parameter/<name>`` (weights, and buffers that a checkpoint would hold), ``optimizer/<name>/<kind>`` (one for
each kind of state that the optimizer keeps for a parameter: ``exp_avg``, ``step``, ...). Names are those of
megatron's sharded state dict, or a plain module's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from unicron.errors import UnicronError
from unicron.model import checkpoint_metadata

if TYPE_CHECKING:
    from unicron.replica import Replica

PARAMETER, OPTIMIZER = "parameter", "optimizer"

MAIN = "main_param"
"""The kind of the float32 copy that an optimizer keeps of a half-precision parameter; the model's build makes it."""


class Piece(NamedTuple):
    """A part of a global tensor."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Where the shard begins in the global tensor."""
    shape: tuple[int, ...]
    """The shard's extent."""
    start: int
    stop: int
    """The held range of the flattened shard; 0 and its number of elements where all of it is held."""
    dtype: str
    """As torch names it, without ``torch.``."""

    @property
    def whole(self) -> bool:
        """Whether the whole shard is held."""
        return self.stop - self.start == math.prod(self.shape)

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.key.split("/")[1]

    @property
    def kind(self) -> str:
        """The kind of the optimizer's state; the name for a parameter."""
        return self.key.rsplit("/", 1)[1]

    @property
    def bytes(self) -> int:
        """Size of what is held."""
        return (self.stop - self.start) * dtype_of(self.dtype).itemsize


class Shard(NamedTuple):
    """A shard of one parameter or persistent buffer that a rank computes with: what it has to hold."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    """The range of the flattened shard that this rank's optimizer updates."""
    updated: bool
    """Whether it updates any."""

    @property
    def size(self) -> int:
        """Number of elements."""
        count: int = math.prod(self.shape)
        return count


class Part(NamedTuple):
    """A shard in a replica's memory."""

    shard: Shard
    weights: torch.Tensor
    """The shard's values, in its shape: a view of the model's."""
    main: torch.Tensor | None
    """What the torch optimizer's state is kept for: the updated range (from ``at`` on), possibly in float32."""
    at: int
    """Where the range begins in ``main``, flattened."""
    copied: bool
    """Whether ``main`` is a copy and not the weights themselves."""
    trained: bool
    """Whether the optimizer of some rank updates the parameter."""


Kinds = dict[str, dict[str, tuple[tuple[int, ...] | None, str]]]
"""Parameter name -> kind of optimizer state -> shape (None: as the parameter) and dtype."""


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with a name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_megatron(model: Any) -> bool:
    """Return whether a model is Megatron's, in its DistributedDataParallel."""
    return hasattr(getattr(model, "module", None), "sharded_state_dict")


def is_sharded(model: Any) -> bool:
    """Return whether the optimizer's state is divided among the data-parallel ranks."""
    return bool(getattr(getattr(model, "ddp_config", None), "use_distributed_optimizer", False))


# What there has to be: pure.


def kinds(held: Iterable[Piece], *, sharded: bool) -> Kinds:
    """Return the kinds of optimizer state that some pieces have.

    Args:
        held: of one step, of any ranks.
        sharded: whether a parameter's state may be missing from ``held`` although it exists (its only holder is
            lost): then every parameter is taken to have all the kinds that any has.
    """
    listed = list(held)
    shapes = {piece.name: piece.global_shape for piece in listed if piece.key.startswith(f"{PARAMETER}/")}
    found: Kinds = {name: {} for name in shapes}
    every: dict[str, tuple[tuple[int, ...] | None, str]] = {}
    for piece in listed:
        if piece.key.startswith(f"{OPTIMIZER}/"):
            # A number stays one, also where the parameter is a number itself.
            like = piece.global_shape == shapes.get(piece.name) != ()
            kind = (None if like else piece.global_shape, piece.dtype)
            every[piece.kind] = found.setdefault(piece.name, {})[piece.kind] = kind
    return dict.fromkeys(found, every) if sharded else found


def needed(shards: Iterable[Shard], kinds_: Kinds) -> list[Piece]:
    """Return the pieces that a rank with these shards has to hold, in a fixed order."""
    answer = []
    for shard in shards:
        place = (shard.global_shape, shard.offset, shard.shape)
        answer.append(Piece(f"{PARAMETER}/{shard.name}", *place, 0, shard.size, shard.dtype))
        if not shard.updated:
            continue
        for kind, (shape, dtype) in sorted(kinds_.get(shard.name, {}).items()):
            key = f"{OPTIMIZER}/{shard.name}/{kind}"
            if shape is None:
                answer.append(Piece(key, *place, shard.start, shard.stop, dtype))
            else:
                answer.append(_undivided(key, shape, dtype))
    return answer


def _undivided(key: str, shape: tuple[int, ...], dtype: str) -> Piece:
    size: int = math.prod(shape)
    return Piece(key, shape, (0,) * len(shape), shape, 0, size, dtype)


# What a replica has in memory.


def pieces(replica: Replica) -> dict[Piece, torch.Tensor]:
    """Return what makes up the state in a replica's memory, as views: writing to them changes it.

    A whole piece's tensor has the shard's shape, a range's is flat.

    Raises:
        UnicronError: the optimizer keeps a state that cannot be named in every layout.
    """
    held: dict[Piece, torch.Tensor] = {}
    for part in replica.parts:
        shard = part.shard
        _add(held, f"{PARAMETER}/{shard.name}", shard, part.weights, 0, shard.size)
        if part.main is None:
            continue
        for kind, value in _state(replica.optimizer, part):
            key = f"{OPTIMIZER}/{shard.name}/{kind}"
            if value.shape == part.main.shape and value.dim():
                whole = value.shape == shard.shape
                values = value if whole else value.reshape(-1)[part.at :][: shard.stop - shard.start]
                _add(held, key, shard, values, shard.start, shard.stop)
            elif value.dim() == 0 or not is_megatron(replica.model):
                held[_undivided(key, tuple(value.shape), _name_of(value.dtype))] = value
            else:
                raise UnicronError(f"{key}: of shape {tuple(value.shape)}, neither a number nor like its parameter")
    return held


def updated(replica: Replica) -> dict[Piece, torch.Tensor]:
    """Return the pieces of which a distributed optimizer has applied an update that the ranks have not yet gathered.

    Of the parameters that is the range that this rank's optimizer updates, and what no optimizer does.
    """
    held = {piece: values for piece, values in pieces(replica).items() if piece.key.startswith(f"{OPTIMIZER}/")}
    for part in replica.parts:
        shard = part.shard
        first, last = (shard.start, shard.stop) if part.trained else (0, shard.size)
        _add(held, f"{PARAMETER}/{shard.name}", shard, part.weights, first, last)
    return held


def _add(held: dict[Piece, torch.Tensor], key: str, shard: Shard, values: torch.Tensor, start: int, stop: int) -> None:
    if stop == start and shard.size:
        return
    piece = Piece(key, shard.global_shape, shard.offset, shard.shape, start, stop, _name_of(values.dtype))
    if piece.whole:
        held[piece] = values.view(shard.shape)
    else:
        held[piece] = values if values.numel() == stop - start else values.view(-1)[start:stop]


def _state(optimizer: Any, part: Part) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the optimizer's state of a part: kind and values."""
    assert part.main is not None
    if part.copied:
        yield MAIN, part.main.data
    for one in torch_optimizers(optimizer):
        for kind, value in sorted(one.state.get(part.main, {}).items()):
            if isinstance(value, torch.Tensor):
                yield kind, value
            elif value is not None:
                raise UnicronError(f"the optimizer's state {kind!r} is not a tensor but {type(value).__name__}")


def allocate(replica: Replica, needed_: Iterable[Piece]) -> None:
    """Make the optimizer's state of a replica hold exactly the kinds in ``needed_``; values are zero."""
    updated_ = {part.shard.name: part for part in replica.parts if part.main is not None}
    state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for piece in needed_:
        if not piece.key.startswith(f"{OPTIMIZER}/") or piece.kind == MAIN:
            continue
        part = updated_[piece.name]
        assert part.main is not None
        dtype = dtype_of(piece.dtype)
        if piece.global_shape == part.shard.global_shape != ():
            values = torch.zeros_like(part.main, dtype=dtype, requires_grad=False)
        else:
            # Torch keeps numbers (the count of steps) on the CPU.
            values = torch.zeros(piece.shape, dtype=dtype, device=part.main.device if piece.shape else "cpu")
        state.setdefault(part.main, {})[piece.kind] = values
    for one in torch_optimizers(replica.optimizer):
        for group in one.param_groups:
            for main in group["params"]:
                one.state[main] = state.get(main, {})


def reset(replica: Replica) -> None:
    """Make the optimizer's state what it is before the first update of the parameters that the model has."""
    allocate(replica, ())
    for one in torch_optimizers(replica.optimizer):
        for group in one.param_groups:
            group.pop("step", None)  # where fused optimizers count
    if hasattr(replica.optimizer, "reload_model_params"):  # Megatron's
        replica.optimizer.reload_model_params()  # float32 copies of half-precision parameters


def count_steps(optimizer: Any, steps: int) -> None:
    """Set the count of steps where an optimizer keeps one for all parameters of a group.

    Transformer Engine's and Apex's do (``group["step"]``), Megatron's choice where there is one. Torch's keep one with
    each parameter, as a tensor: that moves with the state.
    """
    for one in torch_optimizers(optimizer):
        if not any("step" in state for state in one.state.values()):
            for group in one.param_groups:
                group["step"] = steps


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers inside Megatron's wrappers."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    chained = getattr(optimizer, "chained_optimizers", None)
    return [found for one in (chained or [optimizer.optimizer]) for found in torch_optimizers(one)]


def parts(model: Any, optimizer: Any) -> list[Part]:
    """Return the parameters and persistent buffers of a rank's model, cut where global tensors are.

    Raises:
        UnicronError: a parameter of a Megatron model is not in its sharded state dict.
    """
    mains = dict(_mains(optimizer))
    answer = []
    for name, tensor, at, (global_shape, offset, shape) in _shards(model):
        size: int = math.prod(shape)
        weights = tensor.data if tensor.shape == shape else tensor.data.view(-1)[at : at + size].view(shape)
        main, first, last, copied = mains.get(tensor, (None, 0, 0, False))
        # The optimizer may update a range of the parameter, and the parameter be several shards (a gated MLP's two).
        low, high = max(first, at), min(last, at + size)
        if low >= high and size:
            main, low, high = None, at, at
        dtype = _name_of(tensor.dtype)
        shard = Shard(name, global_shape, offset, shape, dtype, low - at, high - at, main is not None)
        trained = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
        answer.append(Part(shard, weights, main, low - first, copied, trained))
    return answer


def _mains(optimizer: Any) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, int, int, bool]]]:
    """Yield each parameter of the model with what its optimizer state is kept for.

    That is a tensor, the range of the flattened parameter that it stands for, and whether it is a copy of it.
    """
    for one in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        ranges = getattr(one, "model_param_group_index_map", None)
        if ranges is not None:  # Megatron's distributed optimizer
            for parameter, (group, order) in ranges.items():
                held = one._get_model_param_range_map(parameter)["param"]
                main = one.optimizer.param_groups[group]["params"][order]
                yield parameter, (main, held.start, held.end, main.dtype != parameter.dtype)
            continue
        halves = zip(getattr(one, "float16_groups", []), getattr(one, "fp32_from_float16_groups", []), strict=True)
        copies = {copy: half for group, mains in halves for half, copy in zip(group, mains, strict=True)}
        for inner in torch_optimizers(one):
            for group in inner.param_groups:
                for main in group["params"]:
                    yield copies.get(main, main), (main, 0, main.numel(), main in copies)


Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Global shape, offset and extent of a shard."""


def _shards(model: Any) -> Iterator[tuple[str, torch.Tensor, int, Box]]:
    """Yield name, local tensor, where the shard begins in it flattened, and the shard's place in the global tensor."""
    if not is_megatron(model):
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                shape = tuple(tensor.shape)
                yield name, tensor, 0, (shape, (0,) * len(shape), shape)
        return
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    state = model.module.sharded_state_dict(metadata=checkpoint_metadata())
    found = set()
    for entry in nested_values(state):
        if not isinstance(entry, ShardedTensor | ShardedTensorFactory) or entry.data is None:
            continue
        found.add(entry.data)
        for shard in nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]:
            at = shard.data.storage_offset() - entry.data.storage_offset()
            shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
            yield shard.key, entry.data, at, (tuple(shard.global_shape), tuple(shard.global_offset), shape)
    missing = [name for name, parameter in model.module.named_parameters() if parameter not in found]
    if missing:
        raise UnicronError(f"parameters that the model's sharded state dict lacks: {', '.join(missing)}")
