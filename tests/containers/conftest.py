"""Images and a running docker-compose.yml for the tests. Where no container can run, they are skipped or fail."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.containers import images
from tests.containers.compose import PREFIX, Project, remove_of_killed_runs, running
from tests.containers.podman import REQUIRE, missing
from tests.e2e.kit import Client, make_corpus

SHM_SIZE = "256m"
"""The tests' models have some hundred kB of state."""


@pytest.fixture(scope="session", autouse=True)
def container_host() -> Iterator[None]:
    """Skip on a machine on which no container can run; fail there if it is required.

    One run at a time has the network.
    """
    if reason := missing():
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {reason}")
        pytest.skip(reason)
    with FileLock(Path(tempfile.gettempdir()) / "unicron-containers.lock"):
        remove_of_killed_runs()
        yield


@pytest.fixture(scope="session")
def built(container_host: None) -> dict[str, str]:
    """Build the images; return them by the variable of docker-compose.yml."""
    bases = images.bases()
    images.build(bases["BASE_IMAGE"])
    found = bases | images.OURS
    for image in found.values():
        print(f"\n{image}: {images.size_bytes(image) / 1e6:.0f} MB", end="")
    print()
    return found


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all nodes have as /data, and that every user can read."""
    folder = tmp_path_factory.mktemp("data")
    folder.chmod(0o755)
    make_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def project(built: dict[str, str], data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The whole system, healthy."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keys = tmp_path_factory.mktemp("keys")
    keys.chmod(0o755)
    variables = {
        "LOG_PASSWORD": secrets.token_hex(24),
        "POSTGRES_PASSWORD": secrets.token_hex(24),
        "KEYS_DIR": str(keys),
        "DATA_DIR": str(data),
        "API_PORT": str(port),
        "SHM_SIZE": SHM_SIZE,
    }
    with running(f"{PREFIX}{os.getpid()}", variables | built) as started:
        yield started


@pytest.fixture(scope="session")
def client(project: Project) -> Iterator[Client]:
    """A client of the API through its published port."""
    with Client(f"http://127.0.0.1:{project.variables['API_PORT']}") as found:
        token = project.execute("api", "unicron", "token", "add", "tester", "--scope", "operate").split()[-1]
        found.http.headers["Authorization"] = f"Bearer {token}"
        yield found
