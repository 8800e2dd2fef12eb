"""The check of a command line: what the verb asks the machine for, and what it prints of the verdict."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shared.launch.check import Check, Configuration
    from shared.launch.command import Launch
    from shared.launch.script import Script

SENTENCES = {
    "unchanged": "runs as it is, and is healed inside the step",
    "speed-off": "is healed inside the step, without settings that change nothing of what is trained",
    "restart": "runs, and is healed by whole restarts from its own checkpoint",
    "refused": "would train wrongly or show a secret, and is refused",
}
"""Verdict -> what is said of the task."""

INSTALL = "install its wheel there, docs/deploy.md#wheels"
"""How a Python gets the library, which no package index has."""

AT_THE_START = "its settings are checked when it calls pretrain(): with one that cannot be healed it restarts whole"
"""What is said of a script of megatron-bridge, whose settings are in Python objects."""

READERS = {
    "megatron": "Megatron-LM's own parser",
    "table": "a table of its releases",
    "script": "the script itself",
    "start": "pretrain()",
}
"""Who has read the arguments -> what is said of it."""

_QUESTION = """
import importlib.metadata, importlib.util, json
def found(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
try:
    core = importlib.metadata.version("megatron-core")
except importlib.metadata.PackageNotFoundError:
    core = ""
has_library = found("unicron.protocol.messages") and found("torch")
if has_library:
    import unicron.protocol.messages
print(json.dumps([has_library, core, found("megatron.training"), found("megatron.bridge")]))
"""
"""What a Python is asked. The library's messages need the standard library alone, of a version that they are for."""


class Python(NamedTuple):
    """What a Python has: the library with its torch, megatron-core (empty: none), and what trains with it."""

    has_library: bool = False
    core: str = ""
    has_training: bool = False
    has_bridge: bool = False


class Checked(NamedTuple):
    """A command line, its script, its arguments, and the verdict.

    ``path``: the script's file; None: it is not here.
    """

    launch: Launch
    script: Script
    check: Check
    path: Path | None

    @property
    def name(self) -> str:
        """What the command line names: the script or the module."""
        return self.launch.script or self.launch.module


def checked(command: list[str], given: Collection[str] = ()) -> Checked:
    """Return the verdict on a command line. ``given``: fields of the specification that the user gives beside it.

    Raises:
        InvalidInput: it starts no script.
    """
    from cli.launch.own_parser import is_here, own_arguments
    from shared.launch.arguments import read_arguments
    from shared.launch.check import check
    from shared.launch.command import parse_command
    from shared.launch.script import Loop, read_script

    launch = parse_command(command)
    folders = [Path.cwd(), *(Path(part) for part in _search_path(launch).split(os.pathsep) if part)]
    script = read_script(launch.script, launch.module, folders, lambda: _installed_core(launch))
    own, path = None, [*folders, *map(Path, sys.path)]
    if script.loop is Loop.MEGATRON_LM:
        python = other_interpreter(launch)
        if is_here(script, path) or (python and _asked(python, _search_path(launch)).has_training):
            own = own_arguments(launch, script, os.environ, python or sys.executable)
    arguments = own or read_arguments(launch.arguments)
    configuration = _configuration(launch, script, path, given)
    found = check(launch, script, arguments, own_parser=own is not None, given=given, configuration=configuration)
    return Checked(launch, script, found, script.path or _program(launch.script))


def _configuration(launch: Launch, script: Script, path: Sequence[Path], given: Collection[str]) -> Configuration:
    """Return the configuration of a script of megatron-bridge's, if that is there, and the user says no fields."""
    from cli.launch.own_configuration import LIMIT_S, names_pretrain, own_configuration
    from cli.launch.own_parser import is_here
    from shared.launch.check import FIELDS, UNKNOWN, Configuration
    from shared.launch.script import Loop
    from shared.tasks.secrets import secret_arguments

    if script.loop is not Loop.BRIDGE or set(FIELDS) <= {*given} or any(secret_arguments(launch.arguments)):
        return UNKNOWN
    if not names_pretrain(script):
        return Configuration("it names no pretrain()")
    python, there = other_interpreter(launch), Python()
    if python:
        there = _asked(python, _search_path(launch))
    if not any(there):  # then a task that is healed inside the step runs in the Python of the node agents
        python, there = sys.executable, _asked(sys.executable, _search_path(launch))
    if not (there.has_bridge or is_here(script, path, "bridge")):
        return UNKNOWN
    if not there.has_library:
        return Configuration(f"{python} has no library ({INSTALL})")
    say(f"runs {launch.script or launch.module} up to pretrain(), to read its settings ({LIMIT_S:.0f} s at most)")
    return own_configuration(launch, script, os.environ, python)


def _search_path(launch: Launch) -> str:
    return launch.environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")


def _installed_core(launch: Launch) -> str:
    """Return the version of megatron-core in the Python that a command line means; empty: it has none.

    One that has neither that nor the library runs nothing of a task that is healed inside the step: then it is the
    version beside this command.
    """
    from importlib import metadata

    if python := other_interpreter(launch):
        answer = _asked(python, _search_path(launch))
        if answer.core or answer.has_library:
            return answer.core
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return ""


def _program(name: str) -> Path | None:
    """Return the file of a program that pip has installed, which is a Python script; None: it is none."""
    found = shutil.which(name) if name and "/" not in name else None
    if found is None:
        return None
    with open(found, "rb") as file:
        first = file.readline(256)
    return Path(found) if first.startswith(b"#!") and b"python" in first else None


def say(text: str) -> None:
    """Tell the user something beside the output of the ranks."""
    print(f"unicron: {text}", file=sys.stderr, flush=True)


def show(found: Checked) -> None:
    """Print a verdict as text."""
    from cli.output import print_table

    verdict = found.check.verdict.value
    print(f"{found.name}: {verdict}: it {SENTENCES[verdict]}")
    if found.check.task["read_by"] == "start":
        print(AT_THE_START)
    if "model" in found.check.task:
        core, by = found.script.core, found.check.task["read_by"]
        print(f"megatron-core: {core or 'unknown'}; arguments read by {READERS[by]}")
    if found.check.findings:
        rows = [
            [f.argument, f.what.value, f"{f.why}. Instead: {f.instead.partition(chr(10))[0]}"]
            for f in found.check.findings
        ]
        print_table(("argument", "effect", "why"), rows)
    if found.check.task["loop"] == "other":
        from shared.launch.check import LINES

        print(f"\nIn a few lines it would heal inside the step:\n\n{LINES}")
    for line in unused(found):
        print(line)


def unused(found: Checked) -> Iterator[str]:
    """Yield the lines that say which programs of a command line are not run, since node agents start the processes."""
    from shared.launch.command import SHELLS, TORCHRUN

    outer = [name for name in found.launch.launchers if name not in SHELLS | TORCHRUN]
    if outer:
        yield f"not run: {', '.join(outer)}; node agents start the processes"
    other = other_interpreter(found.launch)
    if other != interpreter_of(found):
        yield (
            f"not run: {other}, which has no library ({INSTALL}); the script runs in the Python of the node agents "
            f"(here {sys.executable})"
        )


def interpreter_of(found: Checked) -> str:
    """Return the Python of a command line's task; empty: the node agents' own.

    It is the one that the command means, which needs the library unless the script restarts whole.
    """
    other = other_interpreter(found.launch)
    return other if other and (found.check.verdict.value == "restart" or _has_library(found.launch, other)) else ""


def fork_server_interpreter(found: Checked) -> str:
    """Return the Python for the fork servers of an embedded stack; empty: this one, which needs torch then."""
    other = other_interpreter(found.launch)
    return other if other and "," not in other and _has_library(found.launch, other) else ""


def _has_library(launch: Launch, python: str) -> bool:
    """Return whether a Python has the library, and the torch that it needs."""
    return _asked(python, _search_path(launch)).has_library


@functools.cache
def _asked(python: str, search_path: str) -> Python:
    """Return what a Python says that it has, with a search path of modules; nothing, if it does not say."""
    import json
    import subprocess

    from shared.tasks.interpreters import ANSWER_LIMIT_S

    path = {"PYTHONPATH": search_path} if search_path else {}
    command = [python, "-P", "-c", _QUESTION]
    try:
        done = subprocess.run(
            command, env={**os.environ, **path}, capture_output=True, timeout=ANSWER_LIMIT_S, check=True
        )
        return Python(*json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return Python()


def other_interpreter(launch: Launch) -> str:
    """Return the interpreter that a command line means, if it is of another environment than this one; else nothing.

    It is the one that is named, or the one beside torchrun, as which ``torchrun`` alone is found on the path.
    """
    named = launch.interpreter
    if not named and "torchrun" in launch.launchers and (torchrun := shutil.which("torchrun")):
        named = os.path.join(os.path.dirname(torchrun), "python")
    found = named if os.path.isabs(named) else shutil.which(named) if named else None
    if not found or os.path.dirname(found) == os.path.dirname(sys.executable):
        return ""
    return os.path.abspath(found)


def said(found: Checked) -> Iterator[str]:
    """Yield the lines that say how the task of a command line runs, and why."""
    yield f"{found.name} {SENTENCES[found.check.verdict.value]}"
    if found.check.task["read_by"] == "start":
        yield AT_THE_START
    for finding in found.check.findings:
        instead = finding.instead.partition("\n")[0]
        yield f"  {finding.argument}: {finding.why}. Instead: {instead}"
    if found.check.task["loop"] == "other" and found.check.verdict.value != "refused":
        from shared.launch.check import LINES

        yield "In a few lines it would heal inside the step:"
        yield from (f"  {line}" for line in LINES.splitlines())
