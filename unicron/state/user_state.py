"""The user's state: objects that a script gives to ``attach(state=...)``, and the update that they belong to.

The objects change once for each update, after the optimizer has applied it: inside the step's block, or behind it if
the step is completed. Their values between two steps (``Record``) move to other ranks, into snapshots and checkpoints:

    values   plain values and tensors, the same on all ranks, packed into bytes (``unicron.state.user_values``)
    numbers  of the optimizer's parameter groups (learning rate, ...), which schedulers change; packed with the values
    chunks   tensors that are like parameters, as chunks of global tensors (``unicron.state.user_chunks``)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from unicron.errors import UnsupportedState, WrongLoop
from unicron.state import user_values
from unicron.state.chunks import StateChunk
from unicron.state.optimizer_groups import OptimizerGroups
from unicron.state.user_chunks import NamedShards
from unicron.state.user_values import Fill, Values

LAST = "change it after run.optimizer.step(), or after the block if step.completed"


class Record(NamedTuple):
    """The user's state between two steps."""

    content: bytes
    """Values and numbers, packed."""
    values_bytes: bytes
    """The packed values alone, which show that plain values or other tensors have changed."""
    marks: tuple[Any, ...]
    """A number that shows that a tensor that is like a parameter has changed."""
    values: dict[str, Values]
    """The values of each entry."""
    chunks: dict[StateChunk, torch.Tensor]
    """Live tensors, not copies."""


class UserState:
    """The objects of one rank, and the version (updates applied) that they belong to."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        """Take what the script gives.

        Args:
            given: name -> an object with ``state_dict`` and ``load_state_dict``, or a function of model and optimizer
                that makes one. The function is called again for every model and optimizer that ``build`` returns, and
                whenever an object is to be loaded.

        Raises:
            UnsupportedState: an object has no such methods.
        """
        self._given = dict(given or {})
        self.objects: dict[str, Any] = {}
        """The objects by name; empty until there is a model."""
        self.version = -1
        """Updates after which the objects stand; -1: they cannot be used."""
        self.record: Record | None = None
        """The objects at that version."""
        self._shards: NamedShards | None = None
        self._optimizer: Any = None
        self._made_for: Any = None
        """The model for which the given functions have made objects; None: none has been called yet."""
        self._layout = (1, 1)
        self._groups: OptimizerGroups | None = None
        self._begin: dict[str, tuple[Any, list[torch.Tensor]]] = {}
        """The values that each object that was given itself, not as a function, had then. They are put back if the task
        begins once more."""
        self._keeps_tensors: bool | None = None
        """Whether ``state_dict`` returns the same tensors each time; None: not known yet."""
        for name, one in self._given.items():
            if not isinstance(name, str):
                raise UnsupportedState(f"state: names must be text, not {name!r}")
            if not is_state(one) and not callable(one):
                raise UnsupportedState(
                    f"state: {name} is of type {type(one).__name__}; it must have state_dict and load_state_dict, or "
                    "be a function of model and optimizer that makes such an object"
                )
            if is_state(one):
                values = user_values.encode(one.state_dict(), name, lambda key, tensor: None)
                self._begin[name] = (values.document, [tensor.clone() for tensor in values.tensors])

    @property
    def enabled(self) -> bool:
        """Whether the script gives any state: the same on all ranks."""
        return bool(self._given)

    @property
    def shards(self) -> NamedShards:
        """The names of the present model's parameters."""
        assert self._shards is not None
        return self._shards

    @property
    def groups(self) -> OptimizerGroups:
        """The parameter groups of the present model's optimizer."""
        assert self._groups is not None
        return self._groups

    def is_at(self, version: int) -> bool:
        """Return whether the objects, if there are any, stand after ``version`` updates."""
        return not self.enabled or self.version == version

    def belongs_to(self, model: Any) -> bool:
        """Return whether the objects were made for a model."""
        return self._made_for is model

    def bind(self, model: Any, optimizer: Any, layout: tuple[int, int]) -> None:
        """Turn to a model and its optimizer. The record stays that of the former ones until there is a new one.

        Args:
            model: the rank's shard of it.
            optimizer: its optimizer.
            layout: tensor- and pipeline-parallel size.
        """
        self._layout = layout
        if self._shards is None or self._shards.model is not model:
            self._shards, self._optimizer = NamedShards(model), optimizer
            self._groups = OptimizerGroups(optimizer)

    # One step after the other.

    def mark(self, version: int) -> None:
        """Record the objects, which stand after ``version`` updates.

        Raises:
            UnsupportedState: they have a value that cannot be written.
        """
        if self.enabled:
            self.record, self.version = self._encode(), version

    def check_unchanged(self) -> None:
        """Check, before an update is applied, that the objects are as they were before the step.

        Raises:
            WrongLoop: they are not; a step that is interrupted would change them twice.
        """
        if self.enabled and self._changed():
            raise WrongLoop(f"the state {', '.join(self._given)} has changed before the update was applied: {LAST}")

    def leave_step(self, number: int, *, updated: bool) -> None:
        """Find out where the objects stand, after a step that a failure has ended.

        Args:
            number: the step's.
            updated: whether this rank's optimizer had applied the update, to its own part at least.
        """
        if not self.enabled or not self._changed():
            return  # the objects stand after the step before
        if updated:
            self.mark(number)
        elif self.record is not None and self._marks(self.record.values) == self.record.marks:
            self._load_record(self.record)
        else:
            # Tensors of which there is no copy have changed.
            self.record, self.version = None, -1

    def _changed(self) -> bool:
        before, now = self.record, self._encode()
        return before is None or now.values_bytes != before.values_bytes or now.marks != before.marks

    def _load_record(self, record: Record) -> None:
        """Bring the objects back to their record, all of whose tensors in chunks are as they were."""
        kept = {
            path: {key: tensor.clone() for key, tensor in tensors.items()}
            for values in record.values.values()
            for path, tensors in values.like_parameters.items()
        }
        version = self.version
        self.load(record.content, lambda path, prefix: kept.get(path, {}))
        self.mark(version)

    # Encoding.

    def _encode(self) -> Record:
        values = {name: self._values(name, one) for name, one in self.objects.items()}
        if self._keeps_tensors is None:
            again = {name: self._values(name, one) for name, one in self.objects.items()}
            addresses = _addresses(values)
            self._keeps_tensors = addresses is not None and addresses == _addresses(again)
        document: dict[str, Any] = {}
        tensors: list[torch.Tensor] = []
        for name, one in values.items():
            document[name] = [one.document, len(tensors), len(tensors) + len(one.tensors)]
            tensors += one.tensors
        packed = user_values.pack({"layout": self._layout, "entries": document}, tensors)
        content = packed + user_values.pack(self.groups.numbers(), [])
        chunks = {chunk: view for one in values.values() for chunk, view in self.shards.chunks(one).items()}
        return Record(content, packed, self._marks(values), values, chunks)

    def _values(self, name: str, one: Any) -> Values:
        return user_values.encode(one.state_dict(), name, self.shards.prefix_of)

    def _marks(self, values: Mapping[str, Values]) -> tuple[Any, ...]:
        """Return a value that changes when a tensor is written to, or replaced."""
        if self._keeps_tensors:
            return tuple((tensor.data_ptr(), tensor._version) for tensor in _like_parameters(values))
        # The tensors are new each time, so their addresses mean nothing.
        return tuple(_checksum(tensor) for tensor in _like_parameters(values))

    def digests(self) -> dict[str, str]:
        """Return for each entry, and for the optimizer's numbers, a value that is equal if they are equal."""
        assert self.record is not None
        found = {
            "learning rate and other numbers of the optimizer's groups": json.dumps(
                self.groups.numbers(), sort_keys=True
            )
        }
        for name, one in self.record.values.items():
            found[name] = hashlib.sha256(user_values.pack(one.document, one.tensors)).hexdigest()
        return found

    # Loading.

    def reset(self) -> None:
        """Make the objects what they are before the first update of the model's present parameters."""
        unused = self._made_for is None
        self._make()
        for name, (document, tensors) in self._begin.items():
            if not unused:
                value = user_values.decode(document, tensors, name, lambda path, prefix: {})
                self.objects[name].load_state_dict(value)

    def load(self, content: bytes, fill: Fill) -> list[str]:
        """Load the objects.

        Args:
            content: that of a record; bytes behind it do not matter.
            fill: gives the tensors that are like parameters.

        Returns:
            What the content lacks or has too much, in words.

        Raises:
            UnsupportedState: the content is not for this layout or optimizer.
        """
        document, tensors, rest = user_values.unpack(content)
        saved, _, _ = user_values.unpack(rest)
        numbers = self.groups.fitting(saved)
        entries = document["entries"]
        self._check_layout(tuple(document["layout"]), entries, tensors)
        if numbers is None:
            raise UnsupportedState(
                f"state: the optimizer has {[len(groups) for groups in self.groups.numbers()]} parameter groups, and "
                f"was saved with {[len(groups) for groups in saved]}"
            )
        self._make()
        for name, one in self.objects.items():
            if name in entries:
                value, first, stop = entries[name]
                one.load_state_dict(user_values.decode(value, tensors[first:stop], name, fill))
        self.groups.set(numbers)
        missing = [f"it has no state {name!r}, which begins anew" for name in self._given if name not in entries]
        return missing + [
            f"its state {name!r} is not used: the script gives no such object" for name in entries.keys() - self._given
        ]

    def _check_layout(self, layout: Sequence[int], entries: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        if tuple(layout) == self._layout:
            return
        paths = [
            path
            for name, (value, first, stop) in entries.items()
            for path in user_values.shaped(value, tensors[first:stop], name)
        ]
        if paths:
            raise UnsupportedState(
                f"state: {', '.join(paths)}: saved with tensor, pipeline = {tuple(layout)}, now {self._layout}; a "
                "tensor moves between these only as a number, or under the name and in the shape of a parameter"
            )

    def _make(self) -> None:
        """Make the objects for the present model, with an optimizer whose numbers are those of ``build``."""
        self.groups.rebuild()
        self.objects = {name: self._made(name) for name in self._given}
        self._made_for, self._keeps_tensors = self.shards.model, None

    def _made(self, name: str) -> Any:
        given = self._given[name]
        if is_state(given):
            return given
        made = given(self.shards.model, self._optimizer)
        if not is_state(made):
            raise UnsupportedState(
                f"state: the function of {name} returns {type(made).__name__}, without state_dict and load_state_dict"
            )
        return made


def is_state(one: Any) -> bool:
    """Return whether an object can be saved and loaded; a class is rather a function that makes one."""
    has_methods = callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))
    return has_methods and not isinstance(one, type)


def _like_parameters(values: Mapping[str, Values]) -> list[torch.Tensor]:
    return [
        tensor for one in values.values() for tensors in one.like_parameters.values() for tensor in tensors.values()
    ]


def _addresses(values: Mapping[str, Values]) -> list[int] | None:
    """Return where the tensors are; None: they do not count changes."""
    tensors = _like_parameters(values)
    return None if any(tensor.is_inference() for tensor in tensors) else [tensor.data_ptr() for tensor in tensors]


def _checksum(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return xxhash.xxh3_128(flat.numpy().tobytes()).digest()
