"""Whether ranks on this machine can use the files that a submitted specification names, and if not, why.

The api asks the nodes before it takes a submission (``shared.messages.node_files.CheckInputs``). Problems that only
running the task would show are left to the ranks. The rules are those of the built-in trainer
(``unicron/trainer/data.py``), which the control plane does not import.

Where the task has a user of its own, a process of that user looks: an agent that runs as root would find that any file
can be read. The process runs this module as a program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import TypeAdapter

from shared.bus.messages import REASON_CHARACTERS
from shared.errors import Unavailable
from shared.messages.node_files import CheckInputs, InputProblem
from shared.tasks.specification import BYTE_VOCABULARY

INDEX_HEADER = b"MMIDIDX\x00\x00"
"""The first bytes of every index of an indexed dataset (megatron-core, ``indexed_dataset.py``)."""

CHUNK_BYTES = 1 << 20
"""How much of a text is read at a time, in search of a character that is no white space."""

BLANK_BYTES = 64 << 20
"""How much of a text is searched: a fraction of a second's reading. A text that begins with more white space is left to
the ranks."""

MAX_SCRIPT_BYTES = 1 << 20
"""Longest script that is compiled at submission: training loops are far shorter."""

COMPILE_TIMEOUT_S = 3.0
"""Time for a script to be compiled. An interpreter starts in 0.05 s and compiles the longest script in about a second.
What takes longer on a busy machine is left to the ranks; the api waits for a little more
(``services/api/submission/submitted_inputs.py``)."""

_COMPILE = """
import sys, warnings
warnings.simplefilter("ignore")
path, limit_bytes = sys.argv[1], int(sys.argv[2])
try:
    with open(path, "rb") as file:
        text = file.read(limit_bytes + 1)
    if len(text) <= limit_bytes:
        compile(text, path, "exec", dont_inherit=True)
except (SyntaxError, ValueError) as err:  # ValueError: null bytes, before Python 3.11.4
    sys.stdout.buffer.write(f"{type(err).__name__}: {err}".encode(errors="replace"))
except (OSError, RecursionError, MemoryError):
    pass  # the ranks report it
"""
"""The program that compiles a script and does not run it. It is a process of its own, since compiling holds the
interpreter's lock, and a script can be made to exhaust its stack."""

_PROBLEMS = TypeAdapter(list[InputProblem])

_ALLOWED_DATA = "a text file, or the prefix of an indexed dataset"


def file_problems(request: CheckInputs) -> list[InputProblem]:
    """Return why ``data`` and ``script`` cannot be used, as far as files show it. Blocks while it reads."""
    if outside := [*_outside(request)]:
        return outside  # the message says nothing of what the files contain
    problems: list[InputProblem] = []
    find = {"data": _data_problems, "script": _script_problems}
    for field, _ in request.paths:
        try:
            problems += find[field](request)
        except (OSError, ValueError) as err:  # a folder that may not be entered, a name too long, a null byte
            problems.append(InputProblem(field=field, problem=_short(f"cannot be read ({_reason(err)})")))
    return problems


async def file_problems_of(uid: int, request: CheckInputs) -> list[InputProblem]:
    """Return what ``file_problems`` finds as another user; nothing if that takes too long.

    Raises:
        Unavailable: no process could be run as that user.
    """
    # The process gets the modules of this program, and nothing else that the agent's environment may have.
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "PATH") if name in os.environ}
    program = ("-P", "-m", "services.agent.files.task_inputs")
    out = await _run(program, uid=uid, given=request.model_dump_json().encode(), environment=environment)
    if out is None:
        return []
    if not out:
        raise Unavailable(f"user {uid}, under which the task would run, cannot run {' '.join(program[1:])}")
    return _PROBLEMS.validate_json(out)


async def compile_problems(script: str, uid: int | None = None) -> list[InputProblem]:
    """Return why a script is not Python, as the user ``uid`` or the agent's own finds it."""
    program = ("-I", "-S", "-c", _COMPILE, script, str(MAX_SCRIPT_BYTES))
    text = (await _run(program, uid=uid, environment={}) or b"").decode(errors="replace")
    return [InputProblem(field="script", problem=_short(f"not a Python file ({text})"))] if text else []


async def _run(
    program: tuple[str, ...], *, uid: int | None, given: bytes = b"", environment: Mapping[str, str]
) -> bytes | None:
    """Run a Python program; return what it wrote, None if it took longer than ``COMPILE_TIMEOUT_S``."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *program),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
        user=uid,
        group=uid,
        extra_groups=None if uid is None else [],
    )
    try:
        async with asyncio.timeout(COMPILE_TIMEOUT_S):
            out, _ = await process.communicate(given)
            return out
    except TimeoutError:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _outside(request: CheckInputs) -> Iterator[InputProblem]:
    """Yield the files that are not below the directories that a request allows, wherever links lead."""
    if request.directories is None:
        return
    allowed = [Path(directory).resolve() for directory in request.directories]
    for field, path in request.paths:
        if not all(any(one.is_relative_to(a) for a in allowed) for one in _real(path)):
            yield InputProblem(field=field, problem="leads out of the directories that are allowed")


def _real(path: str) -> list[Path]:
    """Return the files that a path stands for, once links are followed."""
    try:
        return [Path(f"{path.removesuffix(end)}{end}").resolve() for end in ("", ".idx", ".bin")] + [
            Path(path).resolve()
        ]
    except (OSError, RuntimeError, ValueError):  # a circle of links, a null byte
        return [Path("/")]


def _data_problems(request: CheckInputs) -> Iterator[InputProblem]:
    data = Path(request.data)
    prefix = data.with_suffix("") if data.suffix in (".bin", ".idx") else data
    index, contents = prefix.with_name(prefix.name + ".idx"), prefix.with_name(prefix.name + ".bin")
    if index.is_file() and contents.is_file():
        _open(index, contents)
        if request.script is None and not _is_index(index):
            what = f"{index.name} is no index of an indexed dataset of megatron-core"
            yield InputProblem(field="data", problem=_short(what))
    elif data.is_file():
        yield from _text_problems(data, request)
    else:
        what = f"there is no such file, nor {contents.name} with {index.name},"
        yield InputProblem(field="data", problem=_short(what), allowed=_ALLOWED_DATA)


def _text_problems(data: Path, request: CheckInputs) -> Iterator[InputProblem]:
    _open(data)
    if data.stat().st_size == 0:
        yield InputProblem(field="data", problem="the file is empty", allowed=_ALLOWED_DATA)
    elif request.script is None:  # a script may read the file as it likes
        if _is_blank(data):
            what = "the file has nothing but white space"
            yield InputProblem(field="data", problem=what, allowed=_ALLOWED_DATA)
        if request.vocabulary < BYTE_VOCABULARY:
            allowed = f"at least {BYTE_VOCABULARY}: one token for each byte, one for the end of a document"
            what = "too small for data, which is a text"
            yield InputProblem(field="model.vocabulary", problem=what, allowed=allowed)


def _is_index(path: Path) -> bool:
    """Return whether a file begins as the index of an indexed dataset."""
    with path.open("rb") as file:
        return file.read(len(INDEX_HEADER)) == INDEX_HEADER


def _is_blank(text: Path) -> bool:
    """Return whether a file has nothing but white space."""
    left = BLANK_BYTES
    with text.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            left -= len(chunk)
            if chunk.strip() or left <= 0:
                return False
    return True


def _script_problems(request: CheckInputs) -> Iterator[InputProblem]:
    if request.script is None:
        return
    script = Path(request.script)
    if not script.is_file():
        yield InputProblem(field="script", problem="there is no such file")
        return
    _open(script)


def _open(*paths: Path) -> None:
    """Open files, which raises an error if they may not be read."""
    for path in paths:
        path.open("rb").close()


def _reason(err: OSError | ValueError) -> str:
    return (err.strerror if isinstance(err, OSError) else None) or str(err)


def _short(text: str) -> str:
    return text[:REASON_CHARACTERS]


if __name__ == "__main__":
    found = file_problems(CheckInputs.model_validate_json(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(_PROBLEMS.dump_json(found))
