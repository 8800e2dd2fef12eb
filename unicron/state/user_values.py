"""Values of state dicts as JSON and tensors: what a script gives to ``attach(state=...)``.

Reading runs no code: plain values become JSON, tensors become safetensors (``pack``) or chunks of the state
(``unicron.state.user_chunks``). Types and the keys of dictionaries are kept, also numbers as keys, tuples, infinities.

JSON of a container is a list that begins with its type:

    ["list" or "tuple", value, ...]
    ["dict", "ordered" or "counter", [[key, value], ...], prefix]    prefix: of the keys of chunks; null: none
    ["tensor", index, type of device]
"""

from __future__ import annotations

import json
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import torch

from unicron import device
from unicron.errors import UnsupportedState

_DICTIONARIES: dict[type[Any], str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
"""The kinds of dictionaries that are kept: torch's schedulers and modules have these."""

_SEQUENCES: dict[type[Any], str] = {list: "list", tuple: "tuple"}

_KEYS = (str, int, float, bool, type(None))
"""Types of keys: those of the values that JSON has outside of containers."""

_LENGTH = struct.Struct("<Q")

DTYPES = frozenset(
    (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
)  # fmt: skip
"""Types of numbers that both safetensors and a checkpoint's parts have."""

PrefixOf = Callable[[str, torch.Tensor], str | None]
"""(key, tensor) -> the part of the key before the name of the parameter that the tensor is like; None: it is like
none."""

Fill = Callable[[str, str], Mapping[str, torch.Tensor]]
"""(path, prefix) -> the tensors, by key, that a dictionary has in chunks."""


def _quoted(key: str) -> str:
    """Return a key as one component of a path, whose components dots separate and which contains no slash."""
    return quote(key, safe="").replace(".", "%2E")


class Values(NamedTuple):
    """An encoded value."""

    document: Any
    """The value as JSON can have it."""
    tensors: list[torch.Tensor]
    """The tensors that the document refers to by index; not copied."""
    like_parameters: dict[str, dict[str, torch.Tensor]]
    """Path of a dictionary -> key -> tensor, for tensors that are like a parameter; not copied."""


def encode(value: Any, entry: str, prefix_of: PrefixOf) -> Values:
    """Encode a state dict.

    Args:
        value: what ``state_dict()`` has returned.
        entry: the name under which the script gave the object.
        prefix_of: tells which tensors are like a parameter.

    Raises:
        UnsupportedState: the state dict has a value that cannot be written; the message names the place.
    """
    encoder = _Encoder(prefix_of)
    return Values(encoder.encode(value, _quoted(entry)), encoder.tensors, encoder.like_parameters)


class _Encoder:
    def __init__(self, prefix_of: PrefixOf) -> None:
        self._prefix_of = prefix_of
        self.tensors: list[torch.Tensor] = []
        self.like_parameters: dict[str, dict[str, torch.Tensor]] = {}

    def encode(self, value: Any, path: str) -> Any:
        if type(value) in (*_KEYS, int):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if type(value) in _SEQUENCES:
            return [_SEQUENCES[type(value)], *(self.encode(one, f"{path}.{i}") for i, one in enumerate(value))]
        if type(value) in _DICTIONARIES:
            return self._dictionary(value, path)
        raise UnsupportedState(
            f"state: {path} is of type {type(value).__module__}.{type(value).__qualname__}, which cannot be saved; "
            "allowed are None, bool, int, float, str, list, tuple, dict and dense tensors"
        )

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            raise UnsupportedState(f"state: {path} is a {type(tensor).__name__} of layout {tensor.layout}, not dense")
        if tensor.dtype not in DTYPES:
            raise UnsupportedState(f"state: {path} has numbers of type {tensor.dtype}, which cannot be saved")
        self.tensors.append(tensor.detach())
        return ["tensor", len(self.tensors) - 1, tensor.device.type]

    def _dictionary(self, value: Mapping[Any, Any], path: str) -> Any:
        items, prefix = [], None
        for key, one in value.items():
            if type(key) not in _KEYS:
                raise UnsupportedState(f"state: {path} has a key of type {type(key).__name__}: {key!r}")
            found = self._prefix_of(key, one) if isinstance(key, str) and isinstance(one, torch.Tensor) else None
            if found is not None and prefix in (None, found) and one.dtype in DTYPES:
                prefix = found
                self.like_parameters.setdefault(path, {})[key] = one.detach()
            else:
                items.append([key, self.encode(one, f"{path}.{_quoted(str(key))}")])
        return [_DICTIONARIES[type(value)], items, prefix]


def decode(document: Any, tensors: Sequence[torch.Tensor], entry: str, fill: Fill) -> Any:
    """Return the value that ``encode`` was given; its tensors are ``tensors``, and what ``fill`` returns."""
    return _decode(document, tensors, _quoted(entry), fill)


def _decode(document: Any, tensors: Sequence[torch.Tensor], path: str, fill: Fill) -> Any:
    if not isinstance(document, list):
        return document
    kind, *rest = document
    if kind == "tensor":
        index, where = rest
        return tensors[index].to(device.current()) if where == "cuda" else tensors[index]
    if kind in _SEQUENCES.values():
        values = [_decode(one, tensors, f"{path}.{i}", fill) for i, one in enumerate(rest)]
        return tuple(values) if kind == "tuple" else values
    make = next(made for made, name in _DICTIONARIES.items() if name == kind)
    items, prefix = rest
    found = make()
    for key, one in items:
        found[key] = _decode(one, tensors, f"{path}.{_quoted(str(key))}", fill)
    if prefix is not None:
        found.update(fill(path, prefix))
    return found


def shaped(document: Any, tensors: Sequence[torch.Tensor], path: str = "") -> list[str]:
    """Return the paths of the tensors of one dimension or more that a document refers to by index."""
    if not isinstance(document, list):
        return []
    kind, *rest = document
    if kind == "tensor":
        return [path] if tensors[rest[0]].dim() else []
    named = [(str(i), one) for i, one in enumerate(rest)] if kind in _SEQUENCES.values() else rest[0]
    return [found for key, one in named for found in shaped(one, tensors, f"{path}.{key}")]


def pack(document: Any, tensors: Sequence[torch.Tensor]) -> bytes:
    """Return a JSON document and the tensors that it refers to as bytes, which have their own length."""
    import safetensors.torch

    encoded = json.dumps(document, separators=(",", ":")).encode()
    # Each in memory of its own: the format has no tensors that share memory.
    listed = {str(i): tensor.cpu().clone(memory_format=torch.contiguous_format) for i, tensor in enumerate(tensors)}
    saved = safetensors.torch.save(listed) if listed else b""
    return _LENGTH.pack(len(encoded)) + _LENGTH.pack(len(saved)) + encoded + saved


def unpack(content: bytes) -> tuple[Any, list[torch.Tensor], bytes]:
    """Return what ``pack`` was given, and the bytes behind it.

    Raises:
        ValueError: the bytes are not what ``pack`` returns.
    """
    import safetensors.torch

    try:
        (json_bytes,), (saved_bytes,) = _LENGTH.unpack_from(content), _LENGTH.unpack_from(content, _LENGTH.size)
        begin = 2 * _LENGTH.size
        document = json.loads(content[begin : begin + json_bytes])
        rest = content[begin + json_bytes :]
        if len(rest) < saved_bytes:
            raise ValueError("cut off")
        listed = safetensors.torch.load(rest[:saved_bytes]) if saved_bytes else {}
        return document, [listed[str(i)] for i in range(len(listed))], rest[saved_bytes:]
    except (struct.error, KeyError, UnicodeDecodeError, safetensors.SafetensorError) as err:
        raise ValueError(f"not a packed state: {err}") from err


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers among an optimizer group's hyperparameters, which schedulers change, for JSON.

    A count of steps is not one of them (``unicron.megatron.optimizer.count_steps``).
    """
    found: dict[str, Any] = {}
    for name, value in group.items():
        if name in ("params", "step"):
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = float(value)
        if type(value) in (int, float):
            found[name] = value
        elif isinstance(value, tuple) and value and all(type(one) in (int, float) for one in value):
            found[name] = list(value)
    return found


def set_numbers(group: dict[str, Any], numbers: Mapping[str, Any]) -> None:
    """Set what ``numbers_of`` returned."""
    for name, value in numbers.items():
        present = group.get(name)
        if isinstance(present, torch.Tensor):
            present.fill_(value)
        else:
            group[name] = tuple(value) if isinstance(value, list) else value
