"""What an agent leaves to its successor: the state of its node, in memory that the supervisor holds.

The agent writes the record before anything that follows from the state leaves it: before a rank's message is answered,
before the end of a process is acknowledged, before a process is killed on request. So the record, the fork server's
list of processes and the messages that ranks repeat make up what the agent knew, wherever it was killed.

The successor may be of another version: the rules for fields are those of messages (``shared.bus.messages``).
"""

from __future__ import annotations

import os

from pydantic import Field, TypeAdapter

from services.agent.node.process import Process
from services.agent.node.slots import Fence
from shared.bus.messages import Message, decode
from shared.errors import Undecodable
from shared.messages.commands import Reply
from shared.messages.signals import Signal


class StoreRecord(Message):
    """A rendezvous store. ``id``: the fork server's name of its process. ``python``: the fork server's."""

    task: str
    generation: int
    id: str
    python: str = ""


class NodeRecord(Message):
    """The state of a node.

    ``sequence``: one higher with every record. ``signals``: the signals without an answer, in order. ``replies``: the
    replies to the newest commands, in order. ``token``: the newest of any command.
    """

    sequence: int = 0
    token: int = 0
    processes: list[Process] = Field(default_factory=list)
    fences: dict[str, Fence] = Field(default_factory=dict)
    signals: list[Signal] = Field(default_factory=list)
    stores: list[StoreRecord] = Field(default_factory=list)
    replies: list[Reply] = Field(default_factory=list)


RECORD: TypeAdapter[NodeRecord] = TypeAdapter(NodeRecord)


class RecordFile:
    """Two files in memory, written in turn: one of them is whole wherever the writer is killed.

    Args:
        descriptors: of the files.
    """

    def __init__(self, descriptors: tuple[int, int]) -> None:
        self.descriptors = descriptors
        self._sequence = max((record.sequence for record in self._records()), default=0)

    @classmethod
    def create(cls) -> RecordFile:
        """Return an empty record."""
        first, second = (os.memfd_create(f"unicron-record-{number}", os.MFD_CLOEXEC) for number in range(2))
        return cls((first, second))

    def write(self, record: NodeRecord) -> None:
        """Replace the record.

        Raises:
            OSError: the system is short of memory.
            ValueError: the record cannot be written as JSON.
        """
        self._sequence += 1
        data = record.model_copy(update={"sequence": self._sequence}).model_dump_json().encode()
        descriptor = self.descriptors[self._sequence % 2]
        os.ftruncate(descriptor, 0)
        written = 0
        while written < len(data):
            written += os.pwrite(descriptor, data[written:], written)

    def read(self) -> NodeRecord | None:
        """Return the newest record that is whole; None if there is none."""
        return max(self._records(), key=lambda record: record.sequence, default=None)

    def _records(self) -> list[NodeRecord]:
        found = []
        for descriptor in self.descriptors:
            data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            try:
                found.append(decode(RECORD, data))
            except Undecodable:
                continue  # empty, or written in part
        return found

    def close(self) -> None:
        """Close the files."""
        for descriptor in self.descriptors:
            os.close(descriptor)
