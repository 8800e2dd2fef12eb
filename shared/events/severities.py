"""Kinds of errors, methods of detection, and severities (Unicron paper, section 4, table 1).

The detector uses them in error events; planner, api and cli read them there.
"""

from __future__ import annotations

from enum import StrEnum


class Severity(StrEnum):
    """The severity of an error. SEV3: retry in place. SEV2: restart the process. SEV1: isolate the node and re-plan."""

    SEV1 = "SEV1"
    SEV2 = "SEV2"
    SEV3 = "SEV3"

    def escalated(self) -> Severity:
        """Return the next worse severity; SEV1 stays."""
        return Severity.SEV2 if self is Severity.SEV3 else Severity.SEV1


class Method(StrEnum):
    """The method that detected an error (Unicron paper, section 4.1)."""

    NODE_HEALTH = "node-health"
    PROCESS_SUPERVISION = "process-supervision"
    EXCEPTION = "exception"
    STATISTICS = "online-statistics"
    DEVICE = "device"
    TRANSITION = "transition"
    REPORT = "report"
    """A monitor from outside (``node.reported``)."""


class ErrorKind(StrEnum):
    """The kind of an error."""

    NODE_LOST = "node-lost"
    PROCESS_EXIT = "process-exit"
    CONNECTION = "connection"
    DEVICE = "device"
    EXCEPTION = "exception"
    COLLECTIVE_TIMEOUT = "collective-timeout"
    HANG = "hang"
    NON_FINITE = "non-finite"
    TRANSITION_FAILED = "transition-failed"
    BROKEN_LINK = "broken-link"
    DIFFERENCE = "difference"
    REPORTED = "reported"


SEVERITY: dict[ErrorKind, Severity] = {
    ErrorKind.NODE_LOST: Severity.SEV1,
    ErrorKind.PROCESS_EXIT: Severity.SEV2,
    ErrorKind.CONNECTION: Severity.SEV3,
    ErrorKind.DEVICE: Severity.SEV1,
    ErrorKind.EXCEPTION: Severity.SEV2,
    ErrorKind.COLLECTIVE_TIMEOUT: Severity.SEV3,
    ErrorKind.HANG: Severity.SEV2,
    ErrorKind.NON_FINITE: Severity.SEV2,
    ErrorKind.TRANSITION_FAILED: Severity.SEV2,
    ErrorKind.BROKEN_LINK: Severity.SEV1,
    ErrorKind.DIFFERENCE: Severity.SEV2,
    ErrorKind.REPORTED: Severity.SEV1,
}
"""Severity of a first occurrence. An error whose response has failed escalates."""
