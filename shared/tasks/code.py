"""The code that comes along with a task: the files of a folder, named by the digest of their archive.

A specification has the name (``code``), and paths relative to the folder. The api keeps the archive
(``services.api.shipped_code``); an agent whose node lacks it asks for it and unpacks it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shared.model import Model

MOST_BYTES = 32 << 20
"""Longest archive. A repository of training code has some megabytes; what is larger is data, or an environment."""

MOST_FILES = 10_000
"""Most files of an archive: several times those of Megatron-LM."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 in hexadecimal."""

WORKING_DIRECTORY = "UNICRON_WORKING_DIRECTORY"
"""Variable of a script: where it runs (``unicron/protocol/environment.py``, which only agents know). Relative: below
the folder of the code that has come along."""

SEARCH_PATH = "PYTHONPATH"
"""Variable with the folders of modules."""


class Code(Model):
    """What a specification says of the code that comes along.

    ``digest``: SHA-256 of the archive. ``size_bytes``: of the archive. ``files``: how many it has, links included.
    """

    digest: Digest
    size_bytes: Annotated[int, Field(ge=1, le=MOST_BYTES)]
    files: Annotated[int, Field(ge=1, le=MOST_FILES)]

    def __str__(self) -> str:
        """Return it in words, for people."""
        plural = "" if self.files == 1 else "s"
        return f"{self.files} file{plural}, {self.size_bytes} bytes, sha256 {self.digest}"


def is_inside(path: str) -> bool:
    """Return whether a path stays in the folder that it is relative to, whatever is there, as long as no link is."""
    return not path.startswith("/") and "\0" not in path and ".." not in path.split("/")
