"""The text of a state: what comes back equals what was written, or nothing is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError
from pydantic_core import PydanticSerializationError

from shared.events.union import Event
from shared.model import Model
from shared.service.state_codec import PairMap, StateCodec, Unlogged
from tests.examples import examples
from tests.shared.samples import events


class Place(NamedTuple):
    name: str
    number: int


class Kind(StrEnum):
    ONE = "one"


class Part(Model):
    place: Place
    renamed: float = Field(default=0.0, alias="wire", serialization_alias="printed")


@dataclass(slots=True)
class Whole:
    parts: tuple[Part, ...] = ()
    by_place: PairMap[Place, list[datetime]] = field(default_factory=dict)
    by_number: dict[int, Kind] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    seen: Event | None = None
    heard: Unlogged[list[int]] = field(default_factory=list)


places = st.builds(Place, st.text(max_size=5), st.integers(-(2**70), 2**70))
times = st.datetimes(timezones=st.just(UTC))
floats = st.floats(allow_nan=False, allow_infinity=False)
wholes = st.builds(
    Whole,
    parts=st.lists(st.builds(lambda at, x: Part(place=at, wire=x), places, floats), max_size=3).map(tuple),
    by_place=st.dictionaries(places, st.lists(times, max_size=2), max_size=3),
    by_number=st.dictionaries(st.integers(), st.sampled_from(Kind), max_size=3),
    names=st.frozensets(st.text(max_size=5), max_size=3),
    seen=st.none() | events,
)


@settings(max_examples=examples(50))
@given(wholes)
def test_every_value_comes_back_as_it_was(whole: Whole) -> None:
    codec = StateCodec(Whole)
    back = codec.load(codec.dump(whole))
    assert back == whole
    assert repr([back.parts, list(back.by_place), back.by_number]) == repr(
        [whole.parts, list(whole.by_place), whole.by_number]
    )


def test_what_is_not_of_the_log_is_left_out() -> None:
    codec = StateCodec(Whole)
    assert codec.load(codec.dump(Whole(heard=[1]))) == Whole()


def test_outside_a_state_a_map_is_written_as_it_always_was() -> None:
    class Printed(Model):
        by_place: PairMap[Place, int]

    assert Printed(by_place={Place("a", 1): 2}).model_dump_json() == '{"by_place":{"a,1":2}}'


def test_a_value_of_another_type_is_not_written() -> None:
    with pytest.raises(PydanticSerializationError):
        StateCodec(Whole).dump(Whole(names=["a"]))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [b"", b"[]", b'{"parts":[{}]}', b"\x80"])
def test_another_text_is_refused(text: bytes) -> None:
    with pytest.raises(ValidationError):
        StateCodec(Whole).load(text)
