"""What every benchmark has in common: JSON lines on standard output, bounds, errors, and the exit status.

    def measure(report: Report) -> None:
        report.line("run", seconds=1.5)
        report.at_most("seconds of a run", 1.5, 2.0)

    sys.exit(run(measure))

Each line is one JSON object; ``line`` names its kind. A bound is a line of kind ``bound`` with ``name``, ``value``,
``bound``, ``relation`` (of the value to the bound) and ``ok``. An error that ends the benchmark is a line of kind
``error`` with the error's ``code`` and ``detail``.

Exit status: 0 if every bound holds, 1 if one is missed, 2 if the benchmark ended with an error (or wrong usage), 130 if
it was interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import operator
import signal
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, TextIO

from shared.errors import UnicronError

MISSED, FAILED, INTERRUPTED = 1, 2, 130

_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}


class Report:
    """The lines of one run.

    Args:
        stream: to print to; standard output if not given.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self.missed: list[str] = []
        """Names of the bounds that do not hold."""

    def line(self, line: str, /, **fields: Any) -> None:
        """Print a line of this kind."""
        print(json.dumps({"line": line, **fields}), file=self._stream, flush=True)

    def at_most(self, name: str, value: float | None, bound: float, **fields: Any) -> bool:
        """Require ``value <= bound``; a value that is missing misses the bound. Return whether the bound holds."""
        return self._bound(name, value, "<=", bound, fields)

    def below(self, name: str, value: float | None, bound: float, **fields: Any) -> bool:
        """Require ``value < bound``, as ``at_most``."""
        return self._bound(name, value, "<", bound, fields)

    def at_least(self, name: str, value: float | None, bound: float, **fields: Any) -> bool:
        """Require ``value >= bound``, as ``at_most``."""
        return self._bound(name, value, ">=", bound, fields)

    def above(self, name: str, value: float | None, bound: float, **fields: Any) -> bool:
        """Require ``value > bound``, as ``at_most``."""
        return self._bound(name, value, ">", bound, fields)

    def equal(self, name: str, value: Any, bound: Any, **fields: Any) -> bool:
        """Require ``value == bound``, as ``at_most``."""
        return self._bound(name, value, "==", bound, fields)

    def _bound(self, name: str, value: Any, relation: str, bound: Any, fields: dict[str, Any]) -> bool:
        ok = value is not None and bool(_RELATIONS[relation](value, bound))
        self.line("bound", name=name, value=value, relation=relation, bound=bound, ok=ok, **fields)
        if not ok:
            self.missed.append(name)
        return ok

    def relay(self, line: dict[str, Any]) -> None:
        """Print a line of another benchmark's run; a bound that was missed there is missed here."""
        print(json.dumps(line), file=self._stream, flush=True)
        if line.get("line") == "bound" and not line["ok"]:
            self.missed.append(line["name"])

    def error(self, error: BaseException) -> None:
        """Print the error that ends the benchmark; the traceback of an unexpected one goes to standard error."""
        match error:
            case UnicronError():
                self.line("error", code=error.code, detail=error.detail)
            case subprocess.CalledProcessError():
                self.line("error", code="process-failed", detail=f"{error}\n{error.stderr or ''}".strip())
            case _:
                traceback.print_exception(error)
                self.line("error", code="unexpected", detail=f"{type(error).__name__}: {error}")


def run(measure: Callable[[Report], Awaitable[None] | None], stream: TextIO | None = None) -> int:
    """Run a benchmark; return its exit status.

    Args:
        measure: measures and prints, as a function or a coroutine function. It removes what it made, however it ends.
        stream: to print to; standard output if not given.
    """
    report = Report(stream)
    before = signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        measuring = measure(report)
        if measuring is not None:
            asyncio.run(_wait(measuring))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED
    except Exception as err:
        report.error(err)
        return FAILED
    finally:
        signal.signal(signal.SIGTERM, before)
    return MISSED if report.missed else 0


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    """End as Ctrl-C does, so that processes that a benchmark has started end with it (``timeout`` sends SIGTERM)."""
    signal.raise_signal(signal.SIGINT)


async def _wait(measuring: Awaitable[None]) -> None:
    await measuring


def at_least(least: int, reason: str = "") -> Callable[[str], int]:
    """Return a parser of whole numbers from ``least`` on, for ``argparse``; ``reason``: why fewer do not do."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            why = f": {reason}" if reason else ""
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, not {text!r}{why}")
        return int(text)

    return parse
