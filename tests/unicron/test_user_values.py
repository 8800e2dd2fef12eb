"""State dicts as JSON and tensors: what goes in comes out, and what cannot be written is refused by name."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from unicron.errors import UnsupportedState
from unicron.state import user_values
from unicron.state.optimizer_groups import OptimizerGroups
from unicron.state.user_chunks import NamedShards
from unicron.state.user_state import UserState


def through_bytes(value: Any) -> Any:
    """Return a value as a process gets it that reads what another has written."""
    encoded = user_values.encode(value, "one", lambda key, tensor: None)
    packed = user_values.pack(encoded.document, encoded.tensors) + b"behind it"
    document, tensors, rest = user_values.unpack(packed)
    assert rest == b"behind it"
    return user_values.decode(document, tensors, "one", lambda path, prefix: {})


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, of the same types, to the last bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        keys = zip(one, other, strict=True)
        return all(type(a) is type(b) and a == b for a, b in keys) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def optimizer(**settings: Any) -> torch.optim.Optimizer:
    model = torch.nn.Linear(3, 2)
    made = torch.optim.AdamW(model.parameters(), lr=0.1, **settings)
    model(torch.ones(3)).sum().backward()
    made.step()
    return made


SCHEDULERS: dict[str, Callable[[], Any]] = {
    "StepLR": lambda: torch.optim.lr_scheduler.StepLR(optimizer(), 2),
    "MultiStepLR": lambda: torch.optim.lr_scheduler.MultiStepLR(optimizer(), [2, 2, 4]),
    "LambdaLR": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer(), lambda step: 0.5**step),
    "OneCycleLR": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer(), 0.3, total_steps=10),
    "ReduceLROnPlateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer()),
    "CosineAnnealingLR": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer(), 10),
}
"""Made in the test: the first optimizer of a process has torch load its compiler, which takes seconds."""


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_comes_back_as_it_was(name: str) -> None:
    one = SCHEDULERS[name]()
    assert same(through_bytes(one.state_dict()), one.state_dict())


def test_types_keys_and_numbers_are_kept() -> None:
    tensors = {"a": torch.tensor(1.5), "b": torch.arange(6).view(2, 3).t(), "c": torch.ones(2, dtype=torch.bfloat16)}
    value = OrderedDict(
        [
            ("optimizer", optimizer().state_dict()),
            ("numbers", (1, -0.0, float("inf"), 2**70, True, None, "text/with.signs%")),
            ("keys", {1: "int", "1": "str", 1.5: 0, None: 0, "a.b": {"c": 1}, "a": {"b.c": 2}}),
            ("counter", Counter([3, 3])),
            ("tensors", tensors),
            ("empty", [[], (), {}, torch.empty(0)]),
        ]
    )
    assert same(through_bytes(value), value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"locks": [1, threading.Lock()]}, r"state: one\.locks\.1 is of type _thread\.lock, which cannot be saved"),
        ({"f": {"g": len}}, r"state: one\.f\.g is of type builtins\.builtin_function_or_method"),
        ({(1, 2): 3}, r"state: one has a key of type tuple: \(1, 2\)"),
        ({"z": torch.ones(2, dtype=torch.complex64)}, r"state: one\.z has numbers of type torch\.complex64"),
        ({"s": torch.ones(2).to_sparse()}, r"state: one\.s is a Tensor of layout torch\.sparse_coo, not dense"),
    ],
)
def test_a_value_that_cannot_be_written_is_refused_by_its_name(value: Any, message: str) -> None:
    with pytest.raises(UnsupportedState, match=message):
        through_bytes(value)


def test_bytes_that_are_cut_off_are_no_state() -> None:
    packed = user_values.pack({"a": 1}, [torch.ones(3)])
    for length in (0, 9, 18, len(packed) - 1):
        with pytest.raises(ValueError, match=r"not a packed state|cut off|column"):
            user_values.unpack(packed[:length])


def test_only_tensors_with_the_name_and_shape_of_a_parameter_are_like_one() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    shards = NamedShards(model)
    value = {
        "average": {f"module.{name}": tensor.clone() for name, tensor in model.state_dict().items()},
        "other": {"0.weight": torch.ones(7), "weight": torch.ones(2, 3)},
    }
    encoded = user_values.encode(value, "ema", shards.prefix_of)
    assert {path: list(tensors) for path, tensors in encoded.like_parameters.items()} == {
        "ema.average": ["module.0.weight", "module.0.bias"]
    }
    assert len(encoded.tensors) == 2
    chunks = shards.chunks(encoded)
    assert {chunk.key for chunk in chunks} == {"state/0.weight/ema.average", "state/0.bias/ema.average"}
    allocated = shards.allocate(shards.required(chunks))
    for chunk, tensor in allocated.chunks.items():
        tensor.copy_(chunks[chunk])
    found = user_values.decode(encoded.document, encoded.tensors, "ema", allocated.fill)
    assert same(found, value)


def test_tensors_move_between_a_module_and_a_list_of_model_chunks() -> None:
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    shards = NamedShards([first, second])
    state = torch.nn.ModuleList([first, second]).state_dict()
    encoded = user_values.encode({f"module.{key}": value for key, value in state.items()}, "ema", shards.prefix_of)
    assert [*encoded.like_parameters["ema"]] == [
        f"module.{index}.{name}" for index in (0, 1) for name in ("weight", "bias")
    ]
    assert encoded.tensors == []
    one = NamedShards(torch.nn.Linear(3, 2))
    allocated = one.allocate(one.required(shards.chunks(encoded)))
    found = user_values.decode(encoded.document, [], "ema", allocated.fill)
    assert [*found] == ["module.weight", "module.bias"]


class Places:
    """An object whose state dict has new tensors each time, as one has that copies them from a device."""

    def __init__(self, model: Any) -> None:
        self.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {name: weights.clone() for name, weights in self.weights.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = dict(state)


class Kept(Places):
    """One whose state dict has the tensors themselves."""

    def state_dict(self) -> dict[str, Any]:
        return self.weights


def bound(made: Any) -> tuple[UserState, Any]:
    model = torch.nn.Linear(3, 2)
    user = UserState({"places": lambda model, optimizer: made(model)})
    user.bind(model, torch.optim.SGD(model.parameters(), lr=0.1), (1, 1))
    user.reset()
    user.mark(4)
    return user, user.objects["places"]


@pytest.mark.parametrize("made", [Places, Kept])
def test_a_step_that_is_left_shows_whether_the_state_has_changed(made: Any) -> None:
    user, one = bound(made)
    user.leave_step(5, updated=True)
    assert user.version == 4
    one.weights["bias"].add_(1.0)
    user.leave_step(5, updated=True)
    assert user.version == 5
    as_of_5 = one.weights["bias"].clone()
    one.weights["bias"].add_(1.0)
    user.leave_step(6, updated=False)
    if made is Places:
        assert user.version == 5
        assert torch.equal(user.objects["places"].weights["bias"], as_of_5)
    else:
        assert (user.version, user.record) == (-1, None)  # there is no copy of the tensors


def test_numbers_and_plain_values_go_back_where_the_update_was_not_applied() -> None:
    model = torch.nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    user = UserState({"scheduler": lambda model, optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)})
    user.bind(model, sgd, (1, 1))
    user.reset()
    for version in (1, 2):
        sgd.step()
        user.objects["scheduler"].step()
        user.mark(version)
    user.objects["scheduler"].step()
    user.leave_step(3, updated=False)
    scheduler = user.objects["scheduler"]
    assert (user.version, scheduler.last_epoch) == (2, 2)
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.01)
    scheduler.step()
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.001)


def test_tensors_without_a_parameters_name_do_not_move_to_another_layout() -> None:
    class Listed:
        def state_dict(self) -> dict[str, Any]:
            return {"average": [torch.ones(3)], "count": torch.tensor(1)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    user = UserState({"listed": Listed()})
    model = torch.nn.Linear(3, 2)
    user.bind(model, torch.optim.SGD(model.parameters(), lr=1.0), (1, 1))
    user.reset()
    user.mark(0)
    assert user.record is not None
    content = user.record.content
    user.bind(model, None, (2, 1))
    with pytest.raises(UnsupportedState, match=r"state: listed\.average\.0: saved with tensor, pipeline = \(1, 1\)"):
        user.load(content, lambda path, prefix: {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"one": 3}, "one is of type int; it must have state_dict and load_state_dict, or be a function"),
        ({1: torch.nn.Linear(1, 1)}, "names must be text, not 1"),
    ],
)
def test_what_is_no_state_is_refused_when_it_is_given(given: Any, message: str) -> None:
    with pytest.raises(UnsupportedState, match=message):
        UserState(given)


def test_numbers_of_groups_are_found_by_group_whatever_their_order() -> None:
    """Also those of early versions, which are in the order of the groups, and where ``build`` has other ones now."""

    def groups(*rates: float) -> tuple[OptimizerGroups, Any]:
        sgd = torch.optim.SGD([{"params": [torch.ones(1)], "lr": rate} for rate in rates], lr=1.0)
        return OptimizerGroups(sgd), sgd

    (own, sgd), (other, _) = groups(1.0, 2.0, 1.0), groups(3.0, 2.0)
    own.align([own.plain(), other.plain()])
    other.align([own.plain(), other.plain()])
    assert [group["lr"] for group in sgd.param_groups] == [1.0, 2.0, 1.0, 3.0]
    assert sgd.param_groups[3]["params"] == []
    sgd.step()
    own.align([own.plain(), other.plain()])
    assert len(sgd.param_groups) == 4, "nothing is added twice"
    sgd.param_groups[1]["lr"] = 0.5
    assert own.numbers() != other.numbers()
    fitting = other.fitting(own.numbers())
    assert fitting is not None
    other.set(fitting)
    assert own.numbers() == other.numbers()
    early, _ = groups(7.0, 8.0)
    assert early.fitting([[{"lr": 0.25}, {"lr": 0.125}]]) == [[{"lr": 0.25}, {"lr": 0.125}]]
    assert early.fitting([[{"lr": 0.25}]]) is None
    changed = early.fitting(groups(5.0, 6.0)[0].numbers())
    assert changed is not None
    assert [one["lr"] for one in changed[0]] == [5.0, 6.0]
