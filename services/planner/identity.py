"""Identity as a key: values that are never changed, as keys of caches that must not compare all that they have."""

from __future__ import annotations

from typing import Generic, TypeVar

Value_co = TypeVar("Value_co", covariant=True)


class Same(Generic[Value_co]):
    """A value as a key of a cache: equal to itself alone. The key keeps it alive, so no other gets its identity."""

    __slots__ = ("value",)

    def __init__(self, value: Value_co) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value
