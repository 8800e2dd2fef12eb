"""The values of tasks' secrets, read on this node as a rank starts (``shared.tasks.secrets``).

They go to the fork server on its socket and from there into the rank's environment, and nowhere else: no message, no
file and no line of a log has them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.errors import Unavailable
from shared.tasks.secrets import PREFIX

MOST_BYTES = 1 << 16
"""Longest value: far above any key, and below what the kernel takes for one variable (128 KiB, execve(2))."""


class TaskSecrets:
    """Reads secrets.

    Args:
        directories: folders below which secrets have to be, wherever links lead; None: any file that the agent can read
            may be one.
    """

    def __init__(self, directories: Sequence[Path] | None = None) -> None:
        self._directories = None if directories is None else [directory.resolve() for directory in directories]

    @classmethod
    def of_node(cls, directories: Sequence[Path], *, separate_users: bool) -> TaskSecrets:
        """Return what reads the secrets of a node.

        Args:
            directories: the setting ``secret_dirs``.
            separate_users: whether tasks run as other users than the agent. Otherwise they can read what it can.
        """
        return cls(directories if directories or separate_users else None)

    def read(self, places: Mapping[str, str]) -> dict[str, str]:
        """Return the values by the names of their variables. Blocks while it reads.

        Raises:
            Unavailable: a secret cannot be used; the error has its name and place.
        """
        values = {}
        for name, place in places.items():
            try:
                values[name] = self._value(place.removeprefix(PREFIX))
            except (OSError, ValueError) as err:
                raise Unavailable(f"secret {name} cannot be used: {place}: {_reason(err)}") from None
        return values

    def problem(self, place: str) -> str:
        """Return why a secret cannot be used; empty if it can."""
        try:
            self._value(place.removeprefix(PREFIX))
        except (OSError, ValueError) as err:
            return _reason(err)
        return ""

    def _value(self, path: str) -> str:
        # O_NONBLOCK: a pipe in the file's place would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # The path of what was opened, wherever links lead.
            real = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if self._directories is not None and not any(real.is_relative_to(one) for one in self._directories):
                raise ValueError("is not below a directory for secrets (UNICRON_SECRET_DIRS of the node)")
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("is no regular file")
            data = os.read(descriptor, MOST_BYTES + 1)
        finally:
            os.close(descriptor)
        if len(data) > MOST_BYTES:
            raise ValueError(f"has more than {MOST_BYTES} bytes")
        if b"\0" in data:
            raise ValueError("has a null byte, which no variable can have")
        try:
            return data.decode().removesuffix("\n")
        except UnicodeDecodeError:
            raise ValueError("is not UTF-8") from None


def _reason(err: OSError | ValueError) -> str:
    return (err.strerror if isinstance(err, OSError) else None) or str(err)
