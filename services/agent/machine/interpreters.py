"""The Pythons of a node in which fork servers run: the node's own, and those that tasks name (``python``).

Each has the library and the torch of its tasks; the agent's own needs no torch. As a program this module prints what a
Python has: ``PYTHON [UID]``; ``unicron doctor`` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from services.agent.versions import agreed
from shared.errors import Unavailable
from shared.tasks.interpreters import ANSWER_LIMIT_S
from shared.tasks.specification import TaskSpec

PACKAGES = ("unicron", "torch", "megatron-core")
"""Distributions whose versions are asked for."""

NEEDED = ("torch", "fsspec", "safetensors", "xxhash")
"""Modules without which a rank cannot run."""

_PROBE = f"""
import importlib.metadata, importlib.util, json, platform, sys
import unicron.protocol.messages
found = {{"python": platform.python_version()}}
for name in {PACKAGES!r}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
found.setdefault("unicron", unicron.__version__)
lacking = [name for name in {NEEDED!r} if importlib.util.find_spec(name) is None]
try:
    from unicron.protocol.versions import OLDEST, VERSION
except ImportError:
    OLDEST = VERSION = unicron.protocol.messages.VERSION
print(json.dumps({{"versions": found, "lacking": lacking, "protocol": [OLDEST, VERSION]}}))
"""
"""The program that a Python is asked to run: it imports the library's messages, which need the standard library alone.
A library of version 2 of the protocol says the version there."""


class Interpreters:
    """Which Python runs the fork server of a task.

    Args:
        listed: the setting ``interpreters``, in its order.
        separate_users: whether tasks have users of their own. A fork server runs as the agent's, so only what the
            operator has listed may run there.
    """

    def __init__(self, listed: Sequence[str], *, separate_users: bool) -> None:
        self._listed = [os.path.normpath(path) for path in listed]
        self._only_listed = separate_users or bool(listed)

    @property
    def default(self) -> str:
        """The Python of tasks that name none."""
        return self._listed[0] if self._listed else sys.executable

    def of(self, spec: TaskSpec) -> str:
        """Return the Python of a task's fork server; empty: the default.

        Raises:
            Unavailable: it may not be used on this node.
        """
        if spec.python is None or spec.restarts_whole:
            return ""  # a script that restarts whole is started by its own Python, as its task's user
        python = os.path.normpath(spec.python)
        if python == self.default:
            return ""
        if problem := self.refusal(python):
            raise Unavailable(f"python: {python} {problem}")
        return python

    def refusal(self, python: str) -> str:
        """Return why a Python may not run a fork server here; empty: it may."""
        if self._only_listed and os.path.normpath(python) not in (*self._listed, self.default):
            listed = ", ".join(self._listed) or "none"
            return f"is not among the interpreters of the node (UNICRON_INTERPRETERS): {listed}"
        return "" if os.access(python, os.X_OK) else "is no program on the node"


async def probe(python: str, uid: int | None = None) -> dict[str, Any]:
    """Return what a Python has: ``versions`` by name, and the modules that it is ``lacking``.

    Args:
        python: its path.
        uid: the user who asks; None: this process's own.

    Raises:
        Unavailable: the file is no Python, or has no library with which this agent can work.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *(python, "-P", "-c", _PROBE),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
        )
    except (OSError, ValueError) as err:
        raise Unavailable(f"cannot be run ({getattr(err, 'strerror', None) or err})") from err
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            out, errors = await process.communicate()
    except TimeoutError:
        raise Unavailable(f"does not say within {ANSWER_LIMIT_S:g} s what it has") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    try:
        found: dict[str, Any] = json.loads(out)
    except ValueError:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2][:200]
        raise Unavailable(f"cannot import the library: {last or f'exit status {process.returncode}'}") from None
    oldest, newest = found["protocol"]
    agreed(python, oldest, newest, found["versions"]["unicron"])
    return found


if __name__ == "__main__":
    try:
        answer = asyncio.run(probe(sys.argv[1], *map(int, sys.argv[2:])))
    except Unavailable as err:
        answer = {"problem": err.detail}
    print(json.dumps({name: answer[name] for name in ("problem", "versions", "lacking") if name in answer}))
