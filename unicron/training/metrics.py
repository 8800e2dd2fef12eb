"""The metrics of a script (``Run.log``): a file for each rank and generation, with a line for each step.

    <directory of the generation>/metrics/<node>-<slot>.jsonl
    {"step": 100, "rank": 0, "values": {"grad_norm": 1.25, "lr": 0.0003}}

A rank writes its file itself, so that a line outlives the rank and costs no agent anything; the api reads the files
through the agents. What a step's block logs is provisional until the step is done: a step that a fault breaks leaves no
line, and is logged by whoever computes it again.

A tensor on a device is read when the ranks agree on a step, as losses are (``unicron.losses``): the host waits for the
device then anyway. One that is logged behind ``step.reduce()`` is read in the next step.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unicron import losses
from unicron.errors import InvalidMetric
from unicron.protocol.messages import Configure

MOST_NAMES = 100
"""Most names of one task; a process takes no more."""

NAME_CHARACTERS = 100
"""Longest name."""

BAND_BYTES = 4 << 20
"""A file that has grown by this much gets half as many steps from there on: the first 40,000 steps of five metrics are
whole, and ten million steps need 32 MB."""


HOST = ("cpu",)
"""Types of devices whose tensors are read as they are logged: nobody waits."""

_NEEDED = "a number is needed, or a tensor of one element"


class _Line(NamedTuple):
    """The metrics of a step that is done."""

    path: Path
    step: int
    rank: int
    values: dict[str, float | torch.Tensor]


class Metrics:
    """What a script logs in one process, over all its generations."""

    def __init__(self) -> None:
        """Begin outside of all steps."""
        self._noted: dict[str, float | torch.Tensor] = {}
        """Of the step in progress."""
        self._lines: list[_Line] = []
        """Of steps that are done, in their order, where tensors are not read yet."""
        self._names: set[str] = set()
        self._in_step = self._again = False
        self._every: dict[Path, int] = {}
        """File -> of how many steps one is written at present."""
        self._file: tuple[Path, int] | None = None
        """The file that was written last, and its descriptor."""
        self._said: set[str] = set()

    def begin(self, *, again: bool = False) -> None:
        """Begin a step, before anything of it is logged.

        Args:
            again: whether it is done, and comes once more with nothing to compute. What is no number then is not known
                any more, and leaves what was logged before as it is.
        """
        self._noted, self._in_step, self._again = {}, True, again

    def log(self, values: Mapping[str, Any]) -> None:
        """Take metrics of the step in progress; of several values of a name the last one counts.

        Raises:
            InvalidMetric: a name or a value cannot be kept.
        """
        if not isinstance(values, Mapping):
            raise InvalidMetric(f"run.log takes a dictionary of names and numbers, not {type(values).__name__}")
        checked = {_name(name): _value(name, value) for name, value in values.items()}
        for name, value in checked.items():
            if name not in self._names and len(self._names) == MOST_NAMES:
                self._say(f"metrics with other names than the first {MOST_NAMES} are left out, as {name!r}")
                continue
            self._names.add(name)
            self._noted[name] = value

    def end(self, configure: Configure, step: int, *, done: bool) -> None:
        """End a step's block, or what was logged behind one: write what is done, forget what is to be done again.

        Args:
            configure: the generation.
            step: the step.
            done: whether the step's update is applied.
        """
        noted, self._noted, self._in_step = self._noted, {}, False
        if self._again:
            noted = {name: value for name, value in noted.items() if math.isfinite(float(value))}
        if noted and done:
            self._lines.append(_Line(_path(configure), step, configure.rank, noted))
            self._write()

    @property
    def in_step(self) -> bool:
        """Whether a step has begun, and its block has not been left."""
        return self._in_step

    def read(self) -> None:
        """Read all tensors: the host waits for the device, if it has not done so."""
        for values in (*(line.values for line in self._lines), self._noted):
            values.update(losses.read(values))
        self._write()

    def _write(self) -> None:
        """Write the lines of which all is read, in their order."""
        while self._lines and not any(isinstance(v, torch.Tensor) for v in self._lines[0].values.values()):
            line = self._lines.pop(0)
            try:
                self._append(line)
            except OSError as err:
                self._say(f"metrics cannot be written to {line.path}: {err.strerror or err}")

    def _append(self, line: _Line) -> None:
        every = self._every.get(line.path, 1)
        if line.step % every:
            return
        file = self._opened(line.path)
        text = json.dumps({"step": line.step, "rank": line.rank, "values": line.values})
        os.write(file, f"{text}\n".encode())
        if os.fstat(file).st_size >= BAND_BYTES * every.bit_length():
            self._every[line.path] = 2 * every
            self._say(f"from step {line.step} on metrics are kept of one step in {2 * every}")

    def _opened(self, path: Path) -> int:
        if self._file is None or self._file[0] != path:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if self._file is not None:
                os.close(self._file[1])
            self._file = path, descriptor
        return self._file[1]

    def _say(self, text: str) -> None:
        """Print what is left out, once."""
        if text not in self._said:
            self._said.add(text)
            print(f"unicron: {text}", file=sys.stderr, flush=True)


def _path(configure: Configure) -> Path:
    worker = str(configure.members[configure.rank][1]).replace("/", "-")
    return Path(os.path.abspath(configure.directory), "metrics", f"{worker}.jsonl")


def _name(name: object) -> str:
    """Return a name.

    Raises:
        InvalidMetric: it is none.
    """
    if isinstance(name, str) and name.isprintable() and 0 < len(name) <= NAME_CHARACTERS:
        return name
    shown = repr(name)[: 2 * NAME_CHARACTERS]
    raise InvalidMetric(f"{shown} is no name of a metric: 1 to {NAME_CHARACTERS} printable characters are allowed")


def _value(name: str, value: Any) -> float | torch.Tensor:
    """Return a value as it is to be kept: a number, or a tensor of its own that is on a device.

    Raises:
        InvalidMetric: it is no number.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise InvalidMetric(f"metric {name!r} has shape {list(value.shape)}: {_NEEDED}")
        kept = losses.noted(value)
        return kept if isinstance(kept, torch.Tensor) and kept.device.type not in HOST else float(kept)
    try:
        number: float = value.__float__()  # of numbers, also numpy's; text has none
    except (AttributeError, OverflowError, TypeError, ValueError):
        raise InvalidMetric(f"metric {name!r} is {type(value).__name__}: {_NEEDED}") from None
    return number
