"""What all events of the log have: an id, a schema version, a time and a stream."""

from __future__ import annotations

import uuid
from datetime import datetime

from shared.model import Model, canonical_json

_NAMESPACE = uuid.UUID("6d9f2f1c-7a3e-5a52-9a55-3f0a3c1b7e10")
"""Namespace of derived ids (UUID version 5): any fixed UUID; another one would change the id of every derived event."""


def derived_id(cause: str, service: str, index: int | str = 0) -> str:
    """Return the id of the ``index``-th event that ``service`` derives from ``cause``."""
    return str(uuid.uuid5(_NAMESPACE, f"{cause}/{service}/{index}"))


class EventBase(Model):
    """What all events have. Each event type fixes ``schema_version``: the version of its shape.

    ``occurred_at``: when the event happened, in UTC; the log adds the time at which it was recorded.
    """

    event_id: str
    schema_version: int
    occurred_at: datetime

    @property
    def stream(self) -> str:
        """The name of the event's stream. A stream's version is the number of events in it."""
        raise NotImplementedError

    def canonical(self) -> str:
        """Return the canonical JSON of the event, which is stored, hashed and compared."""
        return canonical_json(self.model_dump(mode="json", by_alias=True))


class ClusterEvent(EventBase):
    """An event of the cluster as a whole."""

    @property
    def stream(self) -> str:
        """The cluster's stream."""
        return "cluster"


class TaskEvent(EventBase):
    """An event of one task."""

    task: str

    @property
    def stream(self) -> str:
        """The task's stream."""
        return f"task/{self.task}"


class NodeEvent(EventBase):
    """An event of one node."""

    node: str

    @property
    def stream(self) -> str:
        """The node's stream."""
        return f"node/{self.node}"
