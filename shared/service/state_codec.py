"""The state of a service as text and back, for state snapshots (``shared.service.state_snapshots``).

The text is JSON. How a type is written and read follows from its annotations, by pydantic: models, dataclasses, named
tuples, sets and maps need no code of their own. The value that is read equals the one that was written, or nothing is
written: a value of another type than the annotated one is an error, since it would come back as the annotated one.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeAlias, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    WrapSerializer,
)

K = TypeVar("K")
V = TypeVar("V")
S = TypeVar("S")

_STATE = object()
"""Context of the serialisation of a state: elsewhere a model is written as it always was."""


def _as_pairs(value: dict[Any, Any], written: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
    return list(value.items()) if info.context is _STATE else written(value)


def _from_pairs(value: Any) -> Any:
    return {tuple(key): each for key, each in value} if isinstance(value, list) else value


PairMap: TypeAlias = Annotated[dict[K, V], WrapSerializer(_as_pairs), BeforeValidator(_from_pairs)]
"""A map whose keys are tuples, as a list of pairs: keys of a JSON object are text."""

Unlogged: TypeAlias = Annotated[V, Field(exclude=True)]
"""A field that does not follow from the log, such as telemetry: it is not written, and has its default again."""


class StateCodec(Generic[S]):
    """Writes and reads the states of one type.

    Args:
        kind: the type: a model or a dataclass. Maps in it with tuples as keys are ``PairMap``.
    """

    def __init__(self, kind: type[S]) -> None:
        self._adapter: TypeAdapter[S] = TypeAdapter(kind)

    def dump(self, state: S, *, defaults: bool = True) -> bytes:
        """Return the text of a state.

        ``defaults``: whether to write also fields that have their default; the state that is read is the same.

        Raises:
            pydantic_core.PydanticSerializationError: a value has another type than its annotation.
        """
        return self._adapter.dump_json(
            state, by_alias=False, warnings="error", context=_STATE, exclude_defaults=not defaults
        )

    def load(self, text: bytes) -> S:
        """Return the state that ``dump`` has written.

        Raises:
            pydantic.ValidationError: it is no text of such a state.
        """
        return self._adapter.validate_json(text, by_alias=False, by_name=True)
