"""The command line that starts a training script: launchers in front, the script or module, and its arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shared.errors import InvalidInput

TORCHRUN_FLAGS = frozenset({"--standalone", "--no-python", "--run-path", "--virtual-local-rank"})
"""Options of torchrun without a value, beside ``-m``."""

TORCHRUN_VALUES = frozenset(
    "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts --monitor-interval "
    "--start-method --event-log-handler --role --log-dir --redirects --tee --local-ranks-filter "
    "--duplicate-stdout-filters --duplicate-stderr-filters --node-rank --master-addr --master-port --local-addr "
    "--logs-specs --numa-binding --signals-to-handle --shutdown-timeout".split()
)
"""Options of torchrun with a value; each may be written with underscores."""

_TORCHRUN_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})
_SHORT = {"-r": "--redirects", "-t": "--tee"}
TORCHRUN = frozenset({"torchrun", "torchrun_main"})
SHELLS = frozenset({"bash", "sh", "dash", "zsh"})
"""Programs whose text (``-c``) is looked into."""

CONTAINERS = frozenset({"apptainer", "docker", "enroot", "nerdctl", "podman", "singularity"})
"""Programs that start another one in a container."""

_CONTAINER_OPTION = "--container-image"
"""What has srun start a container, by its plugin pyxis."""

_PYTHON = re.compile(r"^(python|pypy)[0-9.]*$")
_PYTHON_VALUES = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True)
class Launch:
    """What a command line starts.

    Exactly one of ``script`` (a path, or the name of a program) and ``module`` is not empty. ``environment``: variables
    set in front. ``launchers``: programs in front of the interpreter, the outermost first. ``container``: the program
    or option that starts it in a container; empty: none does. ``interpreter``: the Python that is named, or that beside
    a torchrun with a path; empty: neither is. ``per_node``, ``nodes``, ``max_restarts``: torchrun's, None where they
    are not given or no numbers.
    """

    script: str = ""
    module: str = ""
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    launchers: tuple[str, ...] = ()
    container: str = ""
    interpreter: str = ""
    per_node: int | None = None
    nodes: int | None = None
    max_restarts: int | None = None

    @property
    def workers(self) -> int | None:
        """Processes that torchrun would start on all nodes; None: it does not say."""
        return None if self.per_node is None else self.per_node * (self.nodes or 1)


def parse_command(tokens: Sequence[str]) -> Launch:
    """Return what a command line starts.

    Variables in front, torchrun with its options, ``python``, ``-m module``, and programs such as srun, mpirun and
    numactl are understood; of the latter, everything up to the interpreter or script is skipped.

    Raises:
        InvalidInput: it starts no script.
    """
    return _parse([*tokens], Launch())


def _parse(tokens: list[str], found: Launch) -> Launch:
    while tokens and _ASSIGNMENT.match(tokens[0]):
        name, _, value = tokens.pop(0).partition("=")
        found = replace(found, environment={**found.environment, name: value})
    if not tokens:
        raise _refused("a script and its arguments must follow --, as behind torchrun", "")
    first, rest = tokens[0], tokens[1:]
    name = _base(first)
    if first == "-m":
        return _module(rest, found)
    if name in TORCHRUN:
        beside = f"{first.removesuffix(name)}python" if first != name else found.interpreter
        return _torchrun(rest, replace(found, launchers=(*found.launchers, "torchrun"), interpreter=beside))
    if _PYTHON.match(name):
        return _python(rest, replace(found, interpreter=first))
    if name in SHELLS:
        return _shell(name, rest, found)
    if first.endswith(".py"):
        return replace(found, script=first, arguments=tuple(rest))
    if first.startswith("-"):
        raise _refused("must be a script, a module (-m) or a launcher, not an option", first)
    at = _start_of_inner(rest)
    if at is None:  # a program of the user's environment, such as one that pip has installed
        return replace(found, script=first, arguments=tuple(rest))
    container = next((token for token in rest[:at] if token.startswith(_CONTAINER_OPTION)), "")
    if container or name in CONTAINERS:
        found = replace(found, container=container or name)
    return _parse(rest[at:], replace(found, launchers=(*found.launchers, name)))


def _start_of_inner(tokens: Sequence[str]) -> int | None:
    """Return where the command begins that a program such as srun starts; None: there is none."""
    for at, token in enumerate(tokens):
        name = _base(token)
        if name in TORCHRUN or name in SHELLS or _PYTHON.match(name) or token.endswith(".py"):
            begins = at
            while begins and _ASSIGNMENT.match(tokens[begins - 1]):  # env A=1 python
                begins -= 1
            return begins
    return None


def _torchrun(tokens: list[str], found: Launch) -> Launch:
    given: dict[str, str] = {}
    module = False
    while tokens and tokens[0].startswith("-") and tokens[0] != "-":
        option, has_value, value = tokens.pop(0).partition("=")
        if option == "--":
            break
        option = _SHORT.get(option, option.replace("_", "-"))
        if option in {"-m", "--module"}:
            module = True
        elif option in TORCHRUN_VALUES:
            if not has_value:
                if not tokens:
                    raise _refused("needs a value", option)
                value = tokens.pop(0)
            given[option] = value
        elif option not in TORCHRUN_FLAGS:
            raise _refused("is no option of torchrun", option)
    found = replace(
        found,
        per_node=_number(given.get("--nproc-per-node")),
        nodes=_number(given.get("--nnodes", "").rpartition(":")[2]),
        max_restarts=_number(given.get("--max-restarts")),
    )
    if not tokens:
        raise _refused("torchrun needs a script", "torchrun")
    return _module(tokens, found) if module else replace(found, script=tokens[0], arguments=tuple(tokens[1:]))


def _python(tokens: list[str], found: Launch) -> Launch:
    while tokens and tokens[0].startswith("-"):
        option = tokens.pop(0)
        if option == "-m":
            if tokens and tokens[0] in _TORCHRUN_MODULES:
                return _torchrun(tokens[1:], replace(found, launchers=(*found.launchers, "torchrun")))
            return _module(tokens, found)
        if option in {"-c", "-"}:
            raise _refused("must be a script in a file", option)
        if option in _PYTHON_VALUES and tokens:
            tokens.pop(0)
    if not tokens:
        raise _refused("must be followed by a script", found.interpreter)
    return replace(found, script=tokens[0], arguments=tuple(tokens[1:]))


def _module(tokens: Sequence[str], found: Launch) -> Launch:
    if not tokens or tokens[0].startswith("-"):
        raise _refused("needs the name of a module", "-m")
    return replace(found, module=tokens[0], arguments=tuple(tokens[1:]))


def _shell(name: str, tokens: list[str], found: Launch) -> Launch:
    """Return what a shell's ``-c`` starts: the last command of its text that starts a script."""
    for at, token in enumerate(tokens):
        if re.fullmatch(r"-[a-z]*c", token) and at + 1 < len(tokens):
            try:
                inner = shlex.split(tokens[at + 1])
            except ValueError as err:
                raise _refused(f"cannot be read: {err}", tokens[at + 1]) from err
            return _parse(inner, replace(found, launchers=(*found.launchers, name)))
    raise _refused("is a shell's script: give the command that it runs, with torchrun or without", name)


def _base(token: str) -> str:
    return token.rpartition("/")[2]


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _refused(problem: str, value: str) -> InvalidInput:
    return InvalidInput.of("SCRIPT", value, problem, "" if value else f"SCRIPT: {problem}")
