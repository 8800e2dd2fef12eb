"""The bus: one connection to NATS, with typed errors.

Urgent messages and requests (signals, heartbeats, commands, health) go over the bus; decisions go to the log
(``shared.log``), which is relayed over the same connection with JetStream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import nats.errors
from nats.aio.client import NO_RESPONDERS_STATUS, Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import Header

from shared.bus import cancellation
from shared.bus.cancellation import cancelled
from shared.bus.credentials import Credential
from shared.bus.dropped import DroppedMessages
from shared.bus.endpoints import Endpoint, Reply, Request
from shared.bus.identities import INBOX, inbox_prefix
from shared.bus.messages import shown
from shared.bus.nats_client import REFUSED_AT_START_PAUSE_S, NatsClient, is_refusal, refused_pauses_s, tls_context
from shared.bus.newest import Newest
from shared.errors import AccessDenied, InvalidReply, LeaseLost, NoReceiver, Unavailable, Undecodable
from shared.model import Clock

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
"""Time for the first connection: the server may be starting at the same time. Later the client reconnects for ever.
Services and agents have a setting for it (``connect_timeout_s``)."""

RECONNECT_WAIT_S = 0.1
"""Pause between attempts to reconnect: below the interval of heartbeats, so that an interruption is not taken for a
lost node."""

PING_INTERVAL_S = 2
"""Interval of the client's pings (PING and PONG of the NATS protocol)."""

PINGS_OUTSTANDING = 2
"""Pings without an answer after which a connection counts as broken, here after 6 s. Without pings a connection whose
link was cut stays as it is, and TCP repeats its segments at intervals that double: after a cut of 30 s, up to 30 s
later. The limit is above what 5% loss and a delay of 0.2 s cause."""

PENDING_MESSAGES = 65_536
"""Most messages of one subscription that may wait for their handler; nats-py drops further ones and reports a slow
consumer."""

PENDING_BYTES = 64 << 20
"""Most bytes of one subscription that may wait."""

JETSTREAM_TIMEOUT_S = 2.0
"""Time-out of a JetStream request. A request that takes longer (an fsync on a very busy disk) is repeated, which has no
further effect; a request that is lost in a restart of the server waits as long."""


class Bus:
    """One connection to NATS, made by ``connect``."""

    def __init__(self, client: NatsClient, name: str, prefix: str) -> None:
        self._client = client
        self._name = name
        self.prefix = prefix
        """The beginning of the subjects of replies to this process."""
        self.dropped = DroppedMessages({})
        """Counts the messages that are not readable, and the requests that ask for a reply where no inbox is."""
        self._trouble = ""
        self._closed = asyncio.Event()
        self._refused = asyncio.Event()
        """Set while servers refuse the credential."""
        self._pauses_s = refused_pauses_s()
        self._established = False
        self._closing = False
        self._requests: set[asyncio.Task[None]] = set()
        self._lost = asyncio.Event()
        """Set when the present connection breaks; each connection has a new one."""

    @classmethod
    async def connect(cls, url: str, *, credential: Credential, name: str, timeout_s: float | None = None) -> Bus:
        """Connect.

        Args:
            url: the URL of the server, or of several servers, separated by commas. The first that answers, in random
                order, is used; when the connection breaks, the next one that answers. With ``tls://``, TLS begins
                before the first byte of NATS's protocol, so that nobody on the way can leave TLS out.
            credential: who this process is.
            name: appears in the server's monitoring.
            timeout_s: how long to wait for a server that does not answer; None: ``CONNECT_TIMEOUT_S``.

        Raises:
            Unavailable: no server answers.
            AccessDenied: a server refuses the credential, twice.
            InvalidInput: the credential's seed or certificates are damaged.
        """
        try:
            return await cls._connect_once(url, credential, name, timeout_s)
        except AccessDenied:
            await asyncio.sleep(REFUSED_AT_START_PAUSE_S)
            return await cls._connect_once(url, credential, name, timeout_s)

    @classmethod
    async def _connect_once(cls, url: str, credential: Credential, name: str, timeout_s: float | None) -> Bus:
        client = NatsClient()
        prefix = inbox_prefix(credential.identity)
        bus = cls(client, name, prefix)
        tls = tls_context(credential.ca) if url.startswith("tls://") else None
        _ = credential.public_key  # raises here, and not inside the client, where the seed is damaged
        # A task of its own, so that a client that hangs can be ended. `reconnect_time_wait` is declared as int, but the
        # client only sleeps for it.
        connecting = asyncio.create_task(
            client.connect(
                url.split(","),
                nkeys_seed_str=credential.seed,
                inbox_prefix=prefix,
                tls=tls,
                tls_handshake_first=tls is not None,
                name=name,
                error_cb=bus._on_error,
                disconnected_cb=bus._on_lost,
                reconnected_cb=bus._on_back,
                closed_cb=bus._on_closed,
                connect_timeout=2,
                reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]
                max_reconnect_attempts=-1,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=PINGS_OUTSTANDING,
            )
        )
        refused = asyncio.create_task(bus._refused.wait())
        try:
            limit_s = CONNECT_TIMEOUT_S if timeout_s is None else timeout_s
            await asyncio.wait({connecting, refused}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                connecting.result()
                bus._established = True
                return bus
        except (OSError, nats.errors.Error) as err:
            raise Unavailable(f"no NATS server at {url}: {err}") from err
        finally:
            await cancellation.end(refused)
            await cancellation.end(connecting)
            if not client.is_connected:
                await bus.close()
        if bus._refused.is_set():
            raise AccessDenied(f"the NATS server at {url} refuses {credential.identity}: {bus._trouble}")
        raise Unavailable(f"no NATS server at {url}: {bus._trouble}")

    @property
    def jetstream(self) -> JetStreamContext:
        """JetStream on this connection."""
        return self._client.jetstream(timeout=JETSTREAM_TIMEOUT_S)

    @property
    def connected(self) -> bool:
        """Whether the connection is up at this moment."""
        return self._client.is_connected

    @property
    def trouble(self) -> str:
        """Why there is no connection at this moment, in words; empty while there is one."""
        if self.connected:
            return ""
        if self._refused.is_set():
            return f"{AccessDenied.code}: the NATS server refuses the credential: {self._trouble}"
        return f"no connection to NATS: {self._trouble}" if self._trouble else "no connection to NATS"

    @property
    def reconnects(self) -> int:
        """How many times the connection was made again."""
        return int(self._client.stats["reconnects"])

    @property
    def closed(self) -> bool:
        """Whether the connection was closed for good."""
        return self._client.is_closed

    @property
    def max_payload_bytes(self) -> int:
        """The largest message that the server accepts."""
        return self._client.max_payload

    @property
    def addresses(self) -> tuple[str, str]:
        """IP addresses of the local and the other end of the connection; empty where the transport knows none."""
        # nats-py has no public way to the socket.
        writer = getattr(getattr(self._client, "_transport", None), "_io_writer", None)
        ends = [writer.get_extra_info(name) if writer is not None else None for name in ("sockname", "peername")]
        local, server = (str(end[0]).partition("%")[0] if end else "" for end in ends)
        return local, server

    @property
    def server_version(self) -> str:
        """Version of the NATS server; empty until there is a connection."""
        if not self._client.connected_url:
            return ""
        version = self._client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    async def wait_connected(self) -> None:
        """Wait until the connection is up and the server has answered on it.

        Raises:
            Unavailable: the connection was closed.
        """
        while True:
            with contextlib.suppress(TimeoutError, nats.errors.Error, OSError), cancellation.kept():
                await self._client.flush(timeout=1)
                if self._client.is_connected:  # the flush also ends when the connection breaks
                    return
            if self._client.is_closed:
                raise Unavailable(f"bus {self._name} is closed")
            await asyncio.sleep(RECONNECT_WAIT_S)

    async def wait_closed(self) -> None:
        """Wait until the connection is closed for good, by ``close``."""
        await self._closed.wait()

    async def publish(self, endpoint: Endpoint[Request, None], message: Request, *parts: str) -> None:
        """Send a message to all who subscribe to an endpoint; ``parts``: the parts of the subject.

        See also ``send``.
        """
        await self.send(endpoint.at(*parts), endpoint.request.encode(message))

    async def subscribe(
        self, endpoint: Endpoint[Request, None], handle: Callable[[Request], Awaitable[None]], *parts: str
    ) -> None:
        """Call ``handle`` for each message to an endpoint, one at a time, in order.

        Exceptions of ``handle`` are logged with their traceback; the next message is handled all the same. A message
        that is not readable is counted and logged in ``dropped``. ``parts``: the parts of the subject; parts that are
        left out may be any.
        """
        await self.listen(endpoint.at(*parts), endpoint.receiver(handle, lambda _: None, self.dropped))

    async def newest(self, endpoint: Endpoint[Request, None], clock: Clock) -> Newest[Request]:
        """Return the newest message of each sender to an endpoint, from now on. ``clock``: as of ``Newest``."""
        found = Newest(endpoint, self.dropped, clock)
        await self.listen(endpoint.subject, found.put)
        return found

    async def call(
        self, endpoint: Endpoint[Request, Reply], request: Request, *parts: str, timeout_s: float | None = None
    ) -> Reply:
        """Send a request to an endpoint, and return the reply. ``timeout_s``: None: that of the endpoint.

        Raises:
            InvalidReply: the reply is not readable; it is counted and logged in ``dropped``.
            Unavailable: as ``request``.
        """
        subject = endpoint.at(*parts)
        limit_s = endpoint.timeout_s if timeout_s is None else timeout_s
        answer = await self.request(subject, endpoint.request.encode(request), timeout_s=limit_s)
        try:
            return endpoint.reply.decode(answer)
        except Undecodable as err:
            self.dropped.note(subject, err)
            raise InvalidReply(f"the answer is not readable: {err.detail}") from err

    async def call_all(
        self,
        endpoint: Endpoint[Request, Reply],
        request: Request,
        *parts: str,
        suffices: Callable[[Sequence[Reply]], bool],
        others_s: float,
    ) -> list[Reply]:
        """Send a request to an endpoint that several processes serve, and return their replies as they came.

        Args:
            endpoint: the endpoint, whose time-out is the longest wait.
            request: the request.
            parts: the parts of the subject.
            suffices: whether the replies so far are those that matter.
            others_s: how long to wait for further replies then.

        Raises:
            InvalidReply: no reply is readable; unreadable ones are counted and logged in ``dropped``.
            NoReceiver: there is no subscriber.
            Unavailable: no reply came in time.
        """
        subject, inbox, came = endpoint.at(*parts), self._client.new_inbox(), asyncio.Event()
        replies: list[Reply] = []
        errors: list[Unavailable] = []

        async def take(message: Msg) -> None:
            try:
                if (message.headers or {}).get(Header.STATUS) == NO_RESPONDERS_STATUS:
                    errors.append(NoReceiver(f"nobody answers on {subject}"))
                else:
                    replies.append(endpoint.reply.decode(message.data))
            except Undecodable as err:
                self.dropped.note(subject, err)
                errors.append(InvalidReply(f"the answer is not readable: {err.detail}"))
            came.set()

        try:
            subscription = await self._client.subscribe(inbox, cb=take)
            try:
                await self._client.publish(subject, endpoint.request.encode(request), reply=inbox)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(endpoint.timeout_s):
                        while not errors and not suffices(replies):
                            await came.wait()
                            came.clear()
                    if not errors:
                        await asyncio.sleep(others_s)
            finally:
                await subscription.unsubscribe()
        except nats.errors.Error as err:
            raise Unavailable(f"no answer on {subject}: {type(err).__name__} {err}") from err
        if not replies:
            raise errors[0] if errors else Unavailable(f"no answer on {subject} within {endpoint.timeout_s} s")
        return replies

    async def serve(
        self,
        endpoint: Endpoint[Request, Reply],
        handle: Callable[[Request], Awaitable[Reply]],
        *parts: str,
        refuse: Callable[[Undecodable], Reply] | None = None,
        group: str = "",
    ) -> None:
        """Reply to the requests to an endpoint with the return value of ``handle``; they are handled concurrently.

        A request that is not readable is counted and logged in ``dropped``, and its reply is what ``refuse`` returns;
        None: all can be read (``NOTHING``). ``parts``: as for ``subscribe``. ``group``: of several processes that name
        the same one, each request comes to one. See also ``answer``.
        """
        await self.answer(endpoint.at(*parts), endpoint.receiver(handle, refuse, self.dropped), group)

    async def send(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        """Send bytes to all subscribers, without a confirmation. While reconnecting the message is buffered.

        Raises:
            Unavailable: the connection is closed, or the buffer is full.
        """
        try:
            with cancellation.kept():
                await self._client.publish(subject, data, headers=headers)
        except nats.errors.Error as err:
            raise Unavailable(f"cannot publish to {subject}: {type(err).__name__} {err}") from err

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send bytes and return the reply.

        Raises:
            NoReceiver: there is no subscriber.
            AccessDenied: no reply came, since the server refuses the credential by now.
            Unavailable: no reply came in time, or the connection broke: the reply is then most likely lost, and the
                caller can repeat the request without waiting for the time-out.
        """
        lost = asyncio.create_task(self._lost.wait())
        asking = asyncio.create_task(self._client.request(subject, data, timeout=timeout_s))
        try:
            await asyncio.wait({asking, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise Unavailable(f"no answer on {subject}: the connection broke")
            return bytes(asking.result().data)
        except nats.errors.NoRespondersError as err:
            raise NoReceiver(f"nobody answers on {subject}") from err
        except (TimeoutError, nats.errors.Error) as err:
            if self._refused.is_set():
                raise AccessDenied(f"no answer on {subject}: {self.trouble}") from err
            raise Unavailable(f"no answer on {subject} within {timeout_s} s: {type(err).__name__} {err}") from err
        finally:
            await cancellation.end(lost)
            await cancellation.end(asking)

    async def listen(self, subject: str, handle: Callable[[str, bytes], Awaitable[object]]) -> None:
        """Call ``handle(subject, data)`` for each message, as ``subscribe`` does."""

        async def receive(message: Msg) -> None:
            try:
                await handle(message.subject, message.data)
            except LeaseLost as err:
                logger.debug("bus: a message on %s is another process's: %s", message.subject, err.detail)
            except Exception:
                logger.exception("bus: handling a message on %s failed", message.subject)

        await self._listen(subject, receive)

    async def answer(self, subject: str, handle: Callable[[str, bytes], Awaitable[bytes]], group: str = "") -> None:
        """Reply to requests with the return value of ``handle(subject, data)``; they are handled concurrently.

        Exceptions of ``handle`` are logged with their traceback; the requester gets no reply. For ``Unavailable`` and
        ``LeaseLost`` there is no traceback. A reply goes to an inbox and nowhere else: it is sent with the rights of
        this process, and the requester may have none for the subject that the request names.
        """

        async def answer(message: Msg) -> None:
            try:
                if message.reply and not message.reply.startswith(f"{INBOX}."):
                    self.dropped.note(message.subject, Undecodable(f"asks for a reply on {shown(message.reply)}"))
                    return
                reply = await handle(message.subject, message.data)
                if message.reply:
                    await message.respond(reply)
            except (LeaseLost, Unavailable) as err:  # logged where it is noticed; the requester asks again
                logger.debug("bus: no answer to a request on %s: %s", message.subject, err.detail)
            except Exception:
                logger.exception("bus: answering a request on %s failed", message.subject)

        async def receive(message: Msg) -> None:
            task = asyncio.create_task(answer(message))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)

        await self._listen(subject, receive, group)

    def stay_away(self, duration_s: float) -> None:
        """Drop the connection, as an injected fault, and make no other one before this time has passed.

        Messages are kept meanwhile as in any other interruption. An infinite time lasts until the process ends.
        """
        self._client.away_until_s = time.monotonic() + duration_s
        self._end_connection()

    async def close(self) -> None:
        """Cancel the requests being served, send pending messages, and disconnect. Closing twice is allowed.

        A cancellation of the caller is raised once the connection is closed, after a second or two at most. A client
        that is half closed would try to reconnect for ever, and the process waits for all of its tasks when it ends.
        """
        await cancellation.completed(self._close())

    async def _close(self) -> None:
        self._closing = True
        tasks = list(self._requests)
        await cancelled(*tasks)
        if self._client.is_connected:
            with contextlib.suppress(TimeoutError, nats.errors.Error, OSError):
                await self._client.flush(timeout=1)
        # On Python 3.11 the client's attempt to reconnect can swallow the cancellation by close() (see the module
        # `cancellation`). It would then go on for ever, or connect again.
        while True:
            await self._close_client()
            attempt: asyncio.Task[None] | None = getattr(self._client, "_reconnection_task", None)
            if attempt is None or attempt.done():
                break
            await cancellation.end(attempt)
        await self._close_client()  # no effect unless that attempt has succeeded

    async def _close_client(self) -> None:
        while True:
            try:
                with cancellation.foreign():
                    await self._client.close()
                return
            except OSError:
                pass  # the flush of pending messages met a lost connection; no message is pending now
            except cancellation.Foreign:
                pass  # close() waited for the end of the connection, like an attempt to reconnect that was cancelled
            # The client stopped half-way in a status in which close() has no effect. There is nothing left to wait for.
            self._end_connection()
            self._client._transport, self._client._status = None, Client.DISCONNECTED

    def _end_connection(self) -> None:
        if self._client._transport is not None:
            self._client._transport.close()  # type: ignore[no-untyped-call]

    async def _on_error(self, err: Exception) -> None:
        # Only this callback reports a publish to a forbidden subject, a slow consumer or a lost connection. An error
        # that repeats at every attempt to reconnect is logged once; the reset after a refused credential is not logged.
        text = f"{type(err).__name__} {err}".strip()
        if refused := is_refusal(text):
            self._refused.set()
        if text != self._trouble and not (isinstance(err, OSError) and self._refused.is_set()):
            self._trouble = text
            logger.warning("bus %s: %s%s", self._name, f"{AccessDenied.code}: " if refused else "", text)
        if refused and self._established and not self.connected:
            # The client waits for this callback, and then makes the next attempt, without closing this connection.
            self._end_connection()
            await asyncio.sleep(next(self._pauses_s))

    async def _on_lost(self) -> None:
        self._lost.set()
        self._lost = asyncio.Event()
        if not self._closing:
            logger.warning("bus %s: connection lost", self._name)

    async def _on_back(self) -> None:
        self._trouble, self._pauses_s = "", refused_pauses_s()
        self._refused.clear()
        logger.warning("bus %s: connected again", self._name)

    async def _on_closed(self) -> None:
        self._closed.set()

    async def _listen(self, subject: str, receive: Callable[[Msg], Awaitable[None]], group: str = "") -> None:
        await self._client.subscribe(
            subject,
            group,
            cb=receive,
            pending_msgs_limit=PENDING_MESSAGES,
            pending_bytes_limit=PENDING_BYTES,
        )
        # The server has the subscription after the second flush: messages sent from now on are not missed. nats-py 2.16
        # writes the ping of a flush at once and the subscription a moment later, so the first pong shows only that the
        # subscription was written.
        await self._client.flush()
        await self._client.flush()
