"""The bus: NATS, thin and typed. What is urgent or asks for an answer goes over it; what is decided goes to the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from shared import cancellation
from shared.errors import Unavailable

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
"""The first connection is given this long: a server that starts beside us may take a moment. Afterwards the client
reconnects for ever."""

RECONNECT_WAIT_S = 0.1
"""Pause between attempts to reconnect. A heartbeat comes four times a second; waiting longer would look like a loss."""

PENDING_MESSAGES = 65_536
"""Messages of one subscription that wait for their handler before the oldest consumer of memory is cut off."""

PENDING_BYTES = 64 << 20
"""The same limit in bytes."""

JETSTREAM_TIMEOUT_S = 2.0
"""Answer of the server to a JetStream request. What takes longer (an fsync on a very busy disk) is tried again, which
does no harm; what is lost in a restart of the server waits this long."""


class Bus:
    """One connection to NATS. Make it with ``connect``."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name
        self._trouble = ""
        self._closed = asyncio.Event()
        self._closing = False
        self._requests: set[asyncio.Task[None]] = set()
        self._lost = asyncio.Event()
        """Set when the present connection breaks; a new one for each connection."""

    @classmethod
    async def connect(cls, url: str, *, token: str = "", name: str) -> Bus:
        """Connect; ``name`` is what the server's monitoring shows.

        Raises:
            Unavailable: no server answers, or it refuses the token.
        """
        client = Client()
        bus = cls(client, name)
        # In a task of its own, and with a float where whole seconds are declared: the client only adds and waits.
        connecting = asyncio.create_task(
            client.connect(
                url,
                token=token or None,
                name=name,
                error_cb=bus._on_error,
                disconnected_cb=bus._on_lost,
                reconnected_cb=bus._on_back,
                closed_cb=bus._on_closed,
                connect_timeout=2,
                reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]
                max_reconnect_attempts=-1,
            )
        )
        try:
            await asyncio.wait({connecting}, timeout=CONNECT_TIMEOUT_S)
            if connecting.done():
                connecting.result()
                return bus
        except (OSError, nats.errors.Error) as err:
            raise Unavailable(f"no NATS server at {url}: {err}") from err
        finally:
            await cancellation.end(connecting)
            if not client.is_connected:
                await bus.close()
        raise Unavailable(f"no NATS server at {url}: {bus._trouble}")

    @property
    def jetstream(self) -> JetStreamContext:
        """JetStream on this connection."""
        return self._client.jetstream(timeout=JETSTREAM_TIMEOUT_S)

    @property
    def connected(self) -> bool:
        """Whether the server is there at this moment."""
        return self._client.is_connected

    @property
    def closed(self) -> bool:
        """Whether the connection is gone for good."""
        return self._client.is_closed

    @property
    def max_payload_bytes(self) -> int:
        """Largest message the server takes."""
        return self._client.max_payload

    async def wait_connected(self) -> None:
        """Wait until the server is there and has answered."""
        while True:
            with contextlib.suppress(TimeoutError, nats.errors.Error, OSError), cancellation.kept():
                await self._client.flush(timeout=1)
                if self._client.is_connected:  # a connection that breaks ends the flush, too
                    return
            if self._client.is_closed:
                raise Unavailable(f"bus {self._name} is closed")
            await asyncio.sleep(RECONNECT_WAIT_S)

    async def wait_closed(self) -> None:
        """Wait until the connection is gone for good: closed here, or by the server with an error (token revoked)."""
        await self._closed.wait()

    async def publish(self, subject: str, data: bytes) -> None:
        """Send a message to whoever listens; nothing tells whether it arrived. Kept back while reconnecting.

        Raises:
            Unavailable: the connection is closed, or too much waits for a reconnection.
        """
        try:
            with cancellation.kept():
                await self._client.publish(subject, data)
        except nats.errors.Error as err:
            raise Unavailable(f"cannot publish to {subject}: {type(err).__name__} {err}") from err

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send a message and return the answer.

        Raises:
            Unavailable: nobody listens, no answer came in time, or the connection broke meanwhile: the answer went
                with it, most likely, and who asks again at once does not wait out the time.
        """
        lost = asyncio.create_task(self._lost.wait())
        asking = asyncio.create_task(self._client.request(subject, data, timeout=timeout_s))
        try:
            await asyncio.wait({asking, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise Unavailable(f"no answer on {subject}: the connection broke")
            return bytes(asking.result().data)
        except nats.errors.NoRespondersError as err:
            raise Unavailable(f"nobody answers on {subject}") from err
        except (TimeoutError, nats.errors.Error) as err:
            raise Unavailable(f"no answer on {subject} within {timeout_s} s: {type(err).__name__} {err}") from err
        finally:
            await cancellation.end(lost)
            await cancellation.end(asking)

    async def subscribe(self, subject: str, handle: Callable[[str, bytes], Awaitable[None]]) -> None:
        """Call ``handle(subject, data)`` for each message, one at a time, in order.

        What ``handle`` raises is logged with its traceback; the next message is handled all the same.
        """

        async def receive(message: Msg) -> None:
            try:
                await handle(message.subject, message.data)
            except Exception:
                logger.exception("bus: handling a message on %s failed", message.subject)

        await self._listen(subject, receive)

    async def serve(self, subject: str, handle: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer requests with what ``handle`` returns; requests are handled concurrently.

        What ``handle`` raises is logged with its traceback; the requester gets no answer.
        """

        async def answer(message: Msg) -> None:
            try:
                reply = await handle(message.data)
                if message.reply:
                    await message.respond(reply)
            except Exception:
                logger.exception("bus: answering a request on %s failed", message.subject)

        async def receive(message: Msg) -> None:
            task = asyncio.create_task(answer(message))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)

        await self._listen(subject, receive)

    async def close(self) -> None:
        """Send what is pending, cancel what is being served, disconnect. Closing twice is allowed."""
        self._closing = True
        tasks = list(self._requests)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client.is_connected:
            with contextlib.suppress(TimeoutError, nats.errors.Error, OSError):
                await self._client.flush(timeout=1)
        # On Python 3.11 the client's attempt to reconnect can swallow the cancellation by close() (see the module
        # ``cancellation``) and would go on for ever, or even connect again: insist.
        while True:
            await self._close_client()
            attempt: asyncio.Task[None] | None = getattr(self._client, "_reconnection_task", None)
            if attempt is None or attempt.done():
                break
            await cancellation.end(attempt)
        await self._close_client()  # without effect unless that attempt had succeeded

    async def _close_client(self) -> None:
        try:
            with cancellation.foreign():
                await self._client.close()
            return
        except OSError:
            pass  # it flushed what was pending into a connection that is lost; nothing is pending now
        except cancellation.Foreign:
            # It waited for the end of a connection, as its attempt to reconnect had when that was cancelled, and the
            # future with it. There is nothing to wait for.
            transport, self._client._transport = self._client._transport, None
            if transport is not None:
                transport.close()  # type: ignore[no-untyped-call]
        # It stopped half-way, and would take itself for closed.
        self._client._status = Client.DISCONNECTED
        await self._client.close()

    async def _on_error(self, err: Exception) -> None:
        # A publish to a forbidden subject, a slow consumer, a lost connection: nothing else tells of these. The same
        # trouble at every attempt to reconnect is told once; a refusal is not hidden by the reset that follows it.
        text = f"{type(err).__name__} {err}".strip()
        if text == self._trouble or (isinstance(err, OSError) and "uthorization" in self._trouble):
            return
        self._trouble = text
        logger.warning("bus %s: %s", self._name, text)

    async def _on_lost(self) -> None:
        self._lost.set()
        self._lost = asyncio.Event()
        if not self._closing:
            logger.warning("bus %s: connection lost", self._name)

    async def _on_back(self) -> None:
        self._trouble = ""
        logger.warning("bus %s: connected again", self._name)

    async def _on_closed(self) -> None:
        self._closed.set()

    async def _listen(self, subject: str, receive: Callable[[Msg], Awaitable[None]]) -> None:
        await self._client.subscribe(
            subject,
            cb=receive,
            pending_msgs_limit=PENDING_MESSAGES,
            pending_bytes_limit=PENDING_BYTES,
        )
        # The server has it when this returns: a message sent from here on is not missed.
        await self._client.flush()
