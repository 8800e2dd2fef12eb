"""One exception tree with stable codes.

    UnicronError
      InvalidInput          a field, its value, what is allowed     422, exit 2
      NotFound              no such task, plan, ...                 404, exit 3
      Conflict              name in use, wrong state, run dir taken 409, exit 4
      Unavailable           a service or the bus does not answer    503, exit 5
      Corrupt               a log that fails its checks             500, exit 6
        ReplayMismatch      a plan decided again differs            500, exit 6
      Fenced                older generation                        409, exit 4
      VersionConflict       the stream moved on, decide again       409, exit 4

``code`` is stable: scripts and problem+json documents name it.
"""

from __future__ import annotations

from typing import Any, ClassVar


class UnicronError(Exception):
    """Base of every error the project raises on purpose."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

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
    """Input that cannot be used. ``errors``: one ``{"field", "value", "problem"}`` each."""

    code = "invalid-input"
    status = 422
    exit_code = 2

    def __init__(self, detail: str, errors: list[dict[str, Any]] | None = None) -> None:
        super().__init__(detail, errors=errors or [])


class NotFound(UnicronError):
    """The thing named does not exist."""

    code = "not-found"
    status = 404
    exit_code = 3


class Conflict(UnicronError):
    """The request contradicts the present state."""

    code = "conflict"
    status = 409
    exit_code = 4


class Fenced(Conflict):
    """A command, signal or result of an older generation."""

    code = "fenced"


class VersionConflict(Conflict):
    """A stream has moved on since it was read."""

    code = "version-conflict"


class Unavailable(UnicronError):
    """Something this needs does not answer."""

    code = "unavailable"
    status = 503
    exit_code = 5


class Corrupt(UnicronError):
    """Stored data fails its own checks."""

    code = "corrupt"
    exit_code = 6


class ReplayMismatch(Corrupt):
    """A decision made again differs from the recorded one."""

    code = "replay-mismatch"
