"""The evidence of an error event, with the part of it that decisions use.

``ErrorDetected.evidence`` is an open JSON object for the reader of an incident: output, tracebacks, where each rank
stood. The fields that decisions use are declared here. The detector builds the object with ``Evidence.mapping``; the
folds of the detector and of the planner parse it with ``Evidence.read``, and use no other entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from shared.events.codes import FailureCode

_SAID_BY_PROCESSES = (FailureCode.PROCESS_EXITED, FailureCode.RANK_RAISED)
"""Codes of failures whose reason a process has said: in its output, or by what it raised."""

_Wait = Annotated[float, Field(ge=0.0, le=86_400.0)]
"""A wait in seconds, up to a day: no time that is computed from a log overflows."""

TRACEBACK_CHARACTERS = 16 * 1024
"""Longest traceback of an exception. Longer ones lose their beginning: the error is at the end."""

DETAIL_CHARACTERS = 1000
"""Longest error message."""

LAST_OUTPUT_BYTES = 4096
"""How much of an ended process's output is kept, from its end: room for a traceback or two."""

STACK_CHARACTERS = 8 * 1024
"""Longest stack of one rank, all its threads together: a training thread has about 20 frames of 100 characters, and
there are three or four other threads. Longer ones lose their end, which is the outermost frames of the last thread."""

STACKS_CHARACTERS = 64 * 1024
"""Longest text of all stacks in one evidence: equal stacks count once. The stacks of the ranks to blame come first."""

REPORTED_RANKS = 256
"""Most ranks whose state, beside their stack, is in one evidence; the ranks to blame come first."""

COLLECTIVE_GROUPS = 64
"""Most process groups of one rank in one answer: a rank of Megatron's has about 20, of which most are never used."""

OPERATIONS = 8
"""Most collectives of one group in one answer that have not ended. A reduction has two or three under way."""

MISSING_COLLECTIVES = 16
"""Most collectives about which the evidence says who is missing."""


def _or_default(kind: Any, default: Callable[[], Any]) -> BeforeValidator:
    """Return a validator that replaces a value of another type by a default."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def validate(value: Any) -> Any:
        try:
            return adapter.validate_python(value)
        except ValidationError:
            return default()

    return BeforeValidator(validate)


def _texts(value: Any) -> Any:
    """Return the texts of a list, in order."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class LostRanks(_Part):
    """The part of a task on a lost node.

    Attributes:
        workers: the node's workers that mattered to the task.
        generation: the newest generation that the task's outstanding plan leads to, else the present one.
        ranks: worker -> rank, of the workers that are members of the present generation.
        step: updates applied.
    """

    workers: list[str]
    generation: int
    ranks: dict[str, int] = Field(default_factory=dict)
    step: int = 0


class Evidence(_Part):
    """The evidence of an error event. A declared field that is absent or malformed in a log has its default.

    Attributes:
        workers: all workers to blame, where there are several.
        failure: the key of the failure; equal keys mean the same failure again.
        place: the exception and the lines from which it was raised; empty: there is none, or nobody knows.
        incarnation: the incarnation of a lost or isolated node.
        tasks: task -> its part on a lost or isolated node.
        pairs: pairs of nodes that could not reach one another, each in the order of the names.
        error_class: the class of the error's text (``services.detector.state.error_classes``); *wire*: ``class``.
        rule: the rule of repetition that made the severity worse: ``worker``, ``node``, ``pair``, ``lemon`` or
            ``starts``; or ``task``: what comes again follows the task, which is to take no newcomers (of the kind
            ``difference``).
        starting: whether the process that failed was one that the outstanding plan has started or waits for.
        code: why a plan could not be carried out (``shared.events.codes``), where a process has said that itself.
        without_progress: how often the task has failed in the same way since its newest step, this failure included; 0:
            this is the first time.
        wait_s: for how long the processes that answer this failure are not to be started, seconds.
        report: the report of a monitor that isolated the node (``NodeReported.report``).
        needs_operator: why the task is not tried any further by itself, in words; empty: it is tried again.
    """

    workers: Annotated[list[str], BeforeValidator(_texts)] = Field(default_factory=list)
    failure: Annotated[str | None, _or_default(str | None, lambda: None)] = None
    place: Annotated[str, _or_default(str, str)] = ""
    incarnation: Annotated[str | None, _or_default(str | None, lambda: None)] = None
    tasks: Annotated[dict[str, LostRanks], _or_default(dict[str, LostRanks], dict)] = Field(default_factory=dict)
    pairs: Annotated[list[tuple[str, str]], _or_default(list[tuple[str, str]], list)] = Field(default_factory=list)
    error_class: Annotated[str, _or_default(str, str)] = Field(default="", alias="class")
    rule: Annotated[str, _or_default(str, str)] = ""
    starting: Annotated[bool, _or_default(bool, bool)] = False
    code: Annotated[str, _or_default(str, str)] = ""
    without_progress: Annotated[int, _or_default(int, int)] = 0
    wait_s: Annotated[float, _or_default(_Wait, float)] = 0.0
    report: Annotated[str, _or_default(str, str)] = ""
    needs_operator: Annotated[str, _or_default(str, str)] = ""

    @classmethod
    def of_plan(cls, workers: list[str], code: FailureCode | None) -> Self:
        """Return the evidence of a plan that could not be carried out."""
        return cls(workers=workers, code=code) if code in _SAID_BY_PROCESSES else cls(workers=workers)

    @classmethod
    def read(cls, evidence: Mapping[str, Any]) -> Self:
        """Return the declared fields of an event's evidence."""
        return cls.model_validate(dict(evidence))

    def mapping(self, **details: Any) -> dict[str, Any]:
        """Return the evidence for an event: the fields that were given, and ``details`` for the reader."""
        return {**details, **self.model_dump(mode="json", exclude_unset=True)}
