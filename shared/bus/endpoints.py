"""Endpoints: what may be sent on the bus, each with its subject, its types and its time-out in one place.

``shared.messages`` declares one beside the messages of each kind, ``shared.messages.endpoints`` lists all of them
(docs/bus.md), and ``Bus.serve``, ``call``, ``publish``, ``subscribe`` and ``newest`` take one. What is not readable is
counted, logged and dropped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

from pydantic import TypeAdapter

from shared.bus.dropped import DroppedMessages, WrongSender
from shared.bus.messages import decode, shown
from shared.errors import Undecodable
from shared.model import Model

T = TypeVar("T")
Request = TypeVar("Request")
Reply = TypeVar("Reply")


class Codec(Generic[T]):
    """How messages of one kind are written: as JSON, unless a subclass says otherwise.

    Args:
        kind: the messages' class, or a union of such classes.
        title: names the kind in docs/bus.md; empty: the class's name does.
    """

    def __init__(self, kind: Any, title: str = "") -> None:
        self._kind, self.title = kind, title or kind.__name__

    @cached_property
    def _adapter(self) -> TypeAdapter[T]:
        return TypeAdapter(self._kind)

    def encode(self, message: T) -> bytes:
        """Return a message as bytes."""
        return cast(Model, message).model_dump_json(by_alias=True).encode()

    def decode(self, data: bytes) -> T:
        """Return the message in ``data``.

        Raises:
            Undecodable: it is no such message.
        """
        return decode(self._adapter, data)


class Signs(Codec[None]):
    """Messages that say by coming all that they say: they are always the same bytes, and any bytes are read as one."""

    def __init__(self, data: bytes) -> None:
        super().__init__(None, f"`{data.decode()}`" if data else "nothing")
        self._data = data

    def encode(self, message: None) -> bytes:
        """Return the bytes."""
        return self._data

    def decode(self, data: bytes) -> None:
        """Take any bytes."""


NOTHING = Signs(b"")
"""No content: of a request that asks nothing further, and in place of the reply to what is published."""


class Endpoint(Generic[Request, Reply]):
    """A place on the bus to which requests are sent, or messages published.

    Args:
        subject: the subject, with ``*`` for each part that differs between instances, such as the node's name.
        request: the class of the requests, or how they are written.
        reply: the same for the replies; ``NOTHING`` if there are none.
        by: the services that may send to it; ``node``: the agents.
        to: who listens.
        timeout_s: how long to wait for a reply, unless the caller says otherwise.
        names_sender: whether the subject ends with the node that sends, and the message has to name the same one.
    """

    def __init__(
        self,
        subject: str,
        request: type[Request] | Codec[Request],
        reply: type[Reply] | Codec[Reply],
        *,
        by: tuple[str, ...],
        to: tuple[str, ...],
        timeout_s: float = 0.0,
        names_sender: bool = False,
    ) -> None:
        self.subject, self.by, self.to = subject, by, to
        self.request = request if isinstance(request, Codec) else Codec[Request](request)
        self.reply = reply if isinstance(reply, Codec) else Codec[Reply](reply)
        self.timeout_s, self._names_sender = timeout_s, names_sender

    def at(self, *parts: str) -> str:
        """Return the subject with these in place of its first parts that are ``*``."""
        subject = self.subject
        for part in parts:
            subject = subject.replace("*", part, 1)
        return subject

    def source(self, subject: str) -> str:
        """Return the name under which an unreadable message is noted: its sender's, if the subject names that."""
        return subject.rpartition(".")[2] if self._names_sender else subject

    def read(self, subject: str, data: bytes) -> Request:
        """Return the request in a message.

        Raises:
            Undecodable: it is not readable.
            WrongSender: it names another node than its subject, for which NATS vouches (``shared.nats.rights``).
        """
        request = self.request.decode(data)
        sender = subject.rpartition(".")[2]
        if self._names_sender and (named := cast(Any, request).node) != sender:
            raise WrongSender(f"it comes from node {sender}, and names node {shown(named)}", node=sender)
        return request

    def receiver(
        self,
        handle: Callable[[Request], Awaitable[Reply]],
        refuse: Callable[[Undecodable], Reply] | None,
        dropped: DroppedMessages,
    ) -> Callable[[str, bytes], Awaitable[bytes]]:
        """Return a function that takes a message's subject and bytes, and returns the bytes of the reply.

        Args:
            handle: returns the reply to a request.
            refuse: returns the reply to a message that is not readable; None: every message is readable.
            dropped: counts and logs those messages.
        """

        async def receive(subject: str, data: bytes) -> bytes:
            try:
                request = self.read(subject, data)
            except Undecodable as err:
                dropped.note(self.source(subject), err)
                if refuse is None:
                    raise
                return self.reply.encode(refuse(err))
            return self.reply.encode(await handle(request))

        return receive
