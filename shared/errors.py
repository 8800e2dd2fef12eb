"""The exceptions of the project: one tree with stable codes, HTTP status codes and exit codes.

    UnicronError
      Unauthenticated       nothing says who sends the request    401, exit 7
      Forbidden             whoever sends it may not do this      403, exit 7
        FaultsDisabled      faults are not injected here          403, exit 7
      InvalidInput          a field, its value, what is allowed     422, exit 2
        Undecodable         a message that is not readable here     422, exit 2
        UnreachableAddress  peers cannot reach a node's address     422, exit 2
        NoDevice            workers' devices are not there          422, exit 2
      NotFound              no such task, plan, ...                 404, exit 3
        Archived            events that are in no segment here      404, exit 3
      Conflict              name in use, wrong state, run dir taken 409, exit 4
        NameInUse           a living agent has the node's name      409, exit 4
        VersionConflict     the stream has new events, decide again 409, exit 4
        LeaseLost           another instance of a service decides   409, exit 4
        NewerVersion        written by a newer version of Unicron   409, exit 4
        OlderVersion        written by an older version of Unicron  409, exit 4
        UnknownPolicy       a simulated policy not known here       409, exit 4
        PreconditionFailed  it is not as the client has read it     412, exit 4
      Unavailable           a service or the bus does not answer    503, exit 5
        Busy                more is asked for than can be done now  503, exit 5
        TooManyRequests     one client asks for more than its due   429, exit 5
        TimeLimit           a request takes longer than is allowed  503, exit 5
        NoReceiver          nobody listens for a request            503, exit 5
        InvalidReply        a reply that is not readable here       503, exit 5
        AccessDenied        the database or the bus refuses         503, exit 5
        TimedOut            waited in vain for a condition          503, exit 8
        AnswerLost          a request is out, and no answer came    503, exit 5
      Corrupt               a log or a plan that fails its checks   500, exit 6

``code`` is stable: scripts and problem+json documents name it. The failures of commands and plans have codes of their
own (``shared.events.codes``).
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Self


class UnicronError(Exception):
    """Base of all exceptions that the project raises for known conditions.

    ``code``: the name of the class, as ``not-found``, unless the class says another. ``detail``: a sentence for people.
    ``extra``: further members of the problem document.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls) -> None:
        if "code" not in vars(cls):
            cls.code = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()

    def __init__(self, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.extra = extra

    def problem(self) -> dict[str, Any]:
        """Return the error as an RFC 9457 problem document."""
        return {
            "type": f"urn:unicron:{self.code}",
            "title": self.code.replace("-", " "),
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            **self.extra,
        }


class InvalidInput(UnicronError):
    """Input that cannot be used. ``errors``: one ``{"field", "value", "problem"}`` for each field that is wrong."""

    status = 422
    exit_code = 2

    def __init__(self, detail: str, errors: list[dict[str, Any]] | None = None) -> None:
        super().__init__(detail, errors=errors or [])

    @classmethod
    def of(cls, field: str, value: Any, problem: str, detail: str = "") -> Self:
        """Return the error of one field. ``detail``: what is said; empty: field, value (unless None) and problem."""
        given = "" if value is None else f"{value!r} "
        return cls(detail or f"{field}: {given}{problem}", [{"field": field, "value": value, "problem": problem}])


class Undecodable(InvalidInput):
    """A message that this program cannot read. ``kind``, ``node``, ``command_id``: as the message says, if it does."""

    def __init__(self, detail: str, *, kind: str = "", node: str = "", command_id: str = "") -> None:
        super().__init__(detail)
        self.kind, self.node, self.command_id = kind, node, command_id


class UnreachableAddress(InvalidInput):
    """A node would advertise an address that other nodes of the cluster cannot reach: a loopback address."""


class NoDevice(InvalidInput):
    """Workers were to have devices that are not there, or only some of a node's workers have a device."""


class Unauthenticated(UnicronError):
    """Nothing says who sends the request, or the token is not known."""

    status = 401
    exit_code = 7


class Forbidden(UnicronError):
    """Whoever sends the request may not do this."""

    status = 403
    exit_code = 7


class FaultsDisabled(Forbidden):
    """Faults may not be injected: the setting ``fault_injection`` is off."""


class NotFound(UnicronError):
    """The named object does not exist."""

    status = 404
    exit_code = 3


class Archived(NotFound):
    """Events were archived, and their segments are not where this program looks for them."""


class Conflict(UnicronError):
    """The request contradicts the present state."""

    status = 409
    exit_code = 4


class NameInUse(Conflict):
    """Another node agent, which is alive, has the node's name."""


class LeaseLost(Conflict):
    """Another instance of this service has taken its lease, and decides in its place."""


class VersionConflict(Conflict):
    """A stream has new events since it was read."""


class NewerVersion(Conflict):
    """A newer version of the program wrote what was read, and this version cannot know what it means."""


class OlderVersion(Conflict):
    """An older version of the program wrote what was read, and this version does not read that any more."""


class UnknownPolicy(Conflict):
    """A policy that this program does not know has decided a simulated history; no other decides in its place."""


class PreconditionFailed(Conflict):
    """What is to be changed is not as the client has read it. ``etag``: its present tag."""

    status = 412


class Unavailable(UnicronError):
    """A service, the bus or another part that is needed does not answer."""

    status = 503
    exit_code = 5


class Busy(Unavailable):
    """All clients together ask for more at once than this machine does."""


class TooManyRequests(Unavailable):
    """One client asks for more at once than its due."""

    status = 429


class TimeLimit(Unavailable):
    """What a client asks for takes longer than is allowed."""


class NoReceiver(Unavailable):
    """Nobody has subscribed to the subject of a request: the subscriber has ended, or is cut off from the bus."""

    code = Unavailable.code


class InvalidReply(Unavailable):
    """The reply to a request came, and this program cannot read it."""

    code = Unavailable.code


class AccessDenied(Unavailable):
    """The database or the bus refuses: a wrong password or token, no such database.

    A process that starts does not wait for it.
    """


class TimedOut(Unavailable):
    """A condition did not come true in time. Whoever waits raises it, and no server: its exit code is its own."""

    exit_code = 8


class AnswerLost(Unavailable):
    """A request that changes something was sent, and no answer came: it may be recorded. The client raises it."""


class Corrupt(UnicronError):
    """Stored data fails its checks."""

    exit_code = 6
