"""``unicron result``."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from cli.options import Format, Output, Server, TaskName, connected
from cli.output import printed_json

if TYPE_CHECKING:
    import httpx

    from unicron_client.resources import Client

READ_TIMEOUT_S = 620.0
"""Longest pause of an answer: the server waits up to 600 s for the digest of a large file."""

ATTEMPTS = 5
"""How often a download is tried; each attempt goes on where the one before it broke off."""

RETRY_PAUSE_S = 2.0
"""Pause between two attempts: a restarted server answers after about this time."""


def result(
    task: TaskName,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Where to write them. Default: TASK.safetensors")
    ] = None,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Fetch the parameters of a task that has succeeded.

    They come from the node that wrote them. The file gets its name once it is complete and its SHA-256 is right; a
    download that broke off goes on when the command is repeated.
    """
    target = file if file is not None else Path(f"{task}.safetensors")
    with connected(server) as client:
        digest = Download(client, f"/v1/tasks/{quote(task, safe='')}/result", target).run()
    size_bytes = target.stat().st_size
    if not printed_json({"path": str(target), "size_bytes": size_bytes, "sha256": digest}, output):
        print(f"{target}: {size_bytes} bytes, sha256 {digest}")


class Download:
    """One file on its way from the server.

    Args:
        client: of the server.
        path: of the resource.
        target: where the file goes; what has arrived lies beside it until it is complete.
    """

    def __init__(self, client: Client, path: str, target: Path) -> None:
        self._client, self._path, self._target = client, path, target
        self._partial: Path | None = None

    def run(self) -> str:
        """Fetch the file; return its SHA-256 in hexadecimal.

        Raises:
            InvalidInput: the file cannot be written.
            Unavailable: the server does not answer, or did not send it all in several attempts.
            Corrupt: what arrived is not what the server announced.
        """
        from shared.errors import InvalidInput, Unavailable

        attempt = 1
        while True:
            try:
                return self._attempt()
            except Unavailable:
                if self._partial is None or attempt == ATTEMPTS:
                    raise
                attempt += 1
                time.sleep(RETRY_PAUSE_S)
            except OSError as err:
                raise InvalidInput(f"cannot write {self._target}: {err.strerror or err}") from err

    def _attempt(self) -> str:
        """Fetch what is not here yet; check it, and give the file its name."""
        from shared.errors import Corrupt

        with self._client.body(self._path, {}, read_timeout_s=READ_TIMEOUT_S) as response:
            tag, size_bytes = response.headers["ETag"], int(response.headers["Content-Length"])
            digest = tag.strip('"')
            self._partial = partial = self._target.with_name(f".{self._target.name}.{digest[:16]}.partial")
            here_bytes = partial.stat().st_size if partial.exists() else 0
            if here_bytes == 0:
                _append(response, partial)
        if 0 < here_bytes < size_bytes:
            rest = {"Range": f"bytes={here_bytes}-", "If-Range": tag}
            with self._client.body(self._path, rest, read_timeout_s=READ_TIMEOUT_S) as response:
                _append(response, partial)
        if _sha256(partial) != digest:
            partial.unlink()
            raise Corrupt(f"what arrived for {self._target} does not have the SHA-256 {digest}; try again")
        os.replace(partial, self._target)
        return digest


def _append(response: httpx.Response, path: Path) -> None:
    with open(path, "ab") as file:
        for block in response.iter_bytes():
            file.write(block)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
