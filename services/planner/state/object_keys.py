"""Keys of caches for values that are never changed, and that have too much to be compared at every look-up."""

from __future__ import annotations

from typing import Generic, TypeVar

Value_co = TypeVar("Value_co", covariant=True)


class ObjectKey(Generic[Value_co]):
    """A value as a key: equal to the same object alone. The key keeps the value alive, so its id is no other's."""

    __slots__ = ("value",)

    def __init__(self, value: Value_co) -> None:
        """Take the value, which nobody may change."""
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectKey) and self.value is other.value
