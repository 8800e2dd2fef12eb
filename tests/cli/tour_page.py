"""docs/tour.md as a test reads it: the commands with their outputs, and what of an output may differ from run to run.

A block of ``console`` has one command, in a line that begins with ``$``, and its output. A comment before the block,
which readers do not see, says how the output is compared (``Rules``):

    <!-- tour
    vary: number time          classes of ``CLASSES`` whose values differ from run to run
    must: running .* 3 of 3    a regular expression that the output has to match, with its values
    capture: PID ^1 +(\\d+)     the group is a value that later commands contain, by this name where it is not known yet
    from: ^## In short         the output is shown from the first line on that matches
    first: 7                   so many lines of it are shown; a line of dots stands for the rest
    repeat                     the command is repeated until its output is as shown
    background                 the command goes on in its own terminal; only what it prints first is compared
    -->

Everything else has to be equal, but for the widths of columns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

CLASSES = {
    "id": r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b",
    "beginning": r"^[0-9a-f]{8}(?= )",
    "remaining": r"\b(?:\d+d\d\dh|\d+h\d\dm|\d+m\d\ds|\d+s)\b",
    "secret": r"\b[A-Za-z0-9_-]{30,}",
    "hash": r"\b[0-9a-f]{64}\b",
    "time": r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)?",
    "duration": r"\b\d+(?:\.\d+)? (?:ms|s|min|h)\b",
    "flop": r"\b\d+(?:\.\d+)?(?:e[+-]?\d+)? ?[kMGTPE]?FLOP(?:/s)?",
    "step": r"\bstep-\d+\b",
    "start": r"\b(?:pending|queued|starting)\b",
    "port": r"(?<=127\.0\.0\.1:)\d+",
    "number": r"(?<![\w.-])[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?: ?[kMGTPEmµn])?(?![\w.-])",
}
"""Classes of values, in the order in which they are looked for."""

REST = "..."
"""The line that stands for the rest of an output."""

_BLOCK = re.compile(
    r"(?:<!-- tour\n(?P<rules>.*?)-->\n+)?```console\n\$ (?P<command>[^\n]*)\n(?P<output>.*?)```\n", re.S
)


@dataclass(frozen=True)
class Rules:
    """How an output is compared; the fields are those of the comment."""

    vary: Sequence[str] = ()
    must: Sequence[str] = ()
    capture: Sequence[str] = ()
    start: str = ""
    first: int = 0
    repeat: bool = False
    background: bool = False


@dataclass(frozen=True)
class Step:
    """A command of the page, the output that the page shows, and the place of that in the page's text."""

    command: str
    output: str
    start: int
    end: int
    rules: Rules = field(default_factory=Rules)


def steps(page: str) -> list[Step]:
    """Return the steps of a page, in order."""
    found = []
    for block in _BLOCK.finditer(page):
        start, end = block.span("output")
        found.append(Step(block["command"], block["output"], start, end, _rules(block["rules"] or "")))
    return found


def _rules(text: str) -> Rules:
    values: dict[str, list[str]] = {}
    for line in text.strip().splitlines():
        name, _, value = line.partition(":")
        values.setdefault(name.strip(), []).append(value.strip())
    unknown = values.keys() - {"vary", "must", "capture", "from", "first", "repeat", "background"}
    assert not unknown, f"unknown rules: {sorted(unknown)}"
    return Rules(
        vary=[name for value in values.get("vary", []) for name in value.split()],
        must=values.get("must", []),
        capture=values.get("capture", []),
        start=values.get("from", [""])[0],
        first=int(values.get("first", ["0"])[0]),
        repeat="repeat" in values,
        background="background" in values,
    )


def shown(output: str, rules: Rules) -> str:
    """Return the part of an output that the page shows."""
    lines = output.splitlines()
    if rules.start:
        begin = next((i for i, line in enumerate(lines) if re.search(rules.start, line)), None)
        lines = lines[begin:] if begin is not None else []
    if rules.first and len(lines) > rules.first:
        lines = [*lines[: rules.first], REST]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def comparable(text: str, rules: Rules) -> list[str]:
    """Return the lines of an output, with classes in place of values that vary and one space for each gap."""
    for name in CLASSES:
        if name in rules.vary:
            text = re.sub(CLASSES[name], f"<{name}>", text, flags=re.M)
    return [" ".join(line.split()) for line in text.splitlines()]


def difference(step: Step, output: str) -> str:
    """Return in what an output is not as the page shows it, for people; empty if it is."""
    there, here = comparable(step.output, step.rules), comparable(shown(output, step.rules), step.rules)
    for number, (expected, got) in enumerate(zip(there, here, strict=False), start=1):
        if expected != got:
            return f"line {number} of the output of `{step.command}` is\n  {got}\nthe page has\n  {expected}"
    if len(there) != len(here):
        return f"`{step.command}` prints {len(here)} lines, the page has {len(there)}:\n{output}"
    missing = lacking(step, output)
    return f"`{step.command}` prints nothing that matches {missing}:\n{output}" if missing else ""


def lacking(step: Step, output: str) -> list[str]:
    """Return the regular expressions that an output has to match and does not."""
    return [must for must in step.rules.must if not re.search(must, output, re.M)]


def captured(step: Step, output: str) -> dict[str, str]:
    """Return what later commands have to contain in place of a value of the page."""
    found = {}
    for rule in step.rules.capture:
        name, pattern = rule.split(maxsplit=1)
        there, here = re.search(pattern, step.output, re.M), re.search(pattern, output, re.M)
        assert here, f"`{step.command}` prints nothing that matches {pattern!r}:\n{output}"
        found[there[1] if there else name] = here[1]
    return found


def rewritten(page: str, outputs: Sequence[str]) -> str:
    """Return the page with other outputs, and in its commands the values that these have. ``outputs``: in order."""
    found = list(zip(steps(page), outputs, strict=True))
    values: dict[str, str] = {}
    for step, output in found:
        values |= captured(step, output)
    for step, output in reversed(found):
        page = page[: step.start] + shown(output, step.rules) + page[step.end :]
    for there, here in values.items():
        page = re.sub(rf"^(\$ .*)\b{re.escape(there)}\b", rf"\g<1>{here}", page, flags=re.M)
    return page
