"""An S3 server on a machine of the bed: moto's, for checkpoints of tasks whose nodes share no directory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.machine import Machine
from tests.condition import until_blocking

BUCKET = "checkpoints"

SECRET = {"AWS_SECRET_ACCESS_KEY": "test"}
"""Variable of its clients that nobody else may see."""

PORT = 5000
"""Of moto's server, unless it is given another one."""

START_S = 60.0
"""moto imports for seconds, with other programs on the same cores."""


class ObjectStore:
    """A server with an empty bucket; it ends with its machine. Made a second time, it is the same one.

    Args:
        machine: where it runs; it is on.

    Attributes:
        variables: environment variables of its clients that anybody may see; ``secrets`` has the other one.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.variables: Mapping[str, str] = {
            "AWS_ENDPOINT_URL": f"http://{machine.address}:{PORT}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        machine.start([sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(PORT)], output="s3.log")
        until_blocking(self._has_bucket, "the S3 server has a bucket", limit_s=START_S)

    def secrets(self, folder: Path) -> dict[str, str]:
        """Return the secrets of a task's specification; their files, which all machines see, are in a folder."""
        places = {}
        for name, value in SECRET.items():
            path = folder / name
            path.touch(0o600)
            path.write_text(f"{value}\n")
            places[name] = f"file:{path}"
        return places

    def _has_bucket(self) -> bool:
        script = f"import s3fs; fs = s3fs.S3FileSystem(); fs.exists({BUCKET!r}) or fs.mkdir({BUCKET!r})"
        settings = [f"{name}={value}" for name, value in {**self.variables, **SECRET}.items()]
        client = ["env", *settings, sys.executable, "-c", script]
        return self._machine.wait(self._machine.start(client, output="s3-client.log"), START_S) == 0
