"""docker-compose.yml under podman-compose: started in the order of its health checks, and taken down without a trace.

Early versions of podman ignore ``service_healthy``, and their probes need systemd. So this module starts the services
that wait for no others, runs their probes until they succeed, and goes on with those that waited for them.
"""

from __future__ import annotations

import graphlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.condition import until_blocking
from tests.containers.images import ROOT
from tests.containers.podman import COMMAND_S, attempt, environment, find_compose, inspected, podman

FILES = (ROOT / "docker-compose.yml", Path(__file__).with_name("network.yaml"))

LABEL = "io.podman.compose.project"
"""Which podman-compose gives to all that it makes, with the project's name."""

PREFIX = "unicron-test-"
"""Of the names of the tests' projects."""

HEALTHY_S = 180.0
"""For a container to become healthy. An agent's fork server imports torch for 5-10 s; two share the cores."""

PAUSE_S = 0.2
"""Between two probes, each of which starts an interpreter."""


def waves() -> Iterator[tuple[str, ...]]:
    """Yield the services that `up` starts, in the order of docker compose: at a time those whose needs are met."""
    document: dict[str, Any] = yaml.safe_load(FILES[0].read_text())
    services = {name: one for name, one in document["services"].items() if "profiles" not in one}
    order = graphlib.TopologicalSorter({name: one.get("depends_on", {}).keys() for name, one in services.items()})
    order.prepare()
    while order.is_active():
        ready = order.get_ready()
        yield tuple(sorted(ready))
        order.done(*ready)


class Project:
    """One run of docker-compose.yml.

    Args:
        name: of the project, which is part of the names of all that it makes.
        variables: of the file (``.env``).
    """

    def __init__(self, name: str, variables: Mapping[str, str]) -> None:
        self.name = name
        self.variables = dict(variables)
        self._environment = {**environment(), **variables}
        files = [word for file in FILES for word in ("--file", str(file))]
        self._command = [str(find_compose()), "--project-name", name, *files]

    def run(self, *arguments: str, stdin: str | None = None, limit_s: float = COMMAND_S) -> str:
        """Run podman-compose; return what it printed.

        Raises:
            AssertionError: it failed; with what it said.
        """
        done = subprocess.run(
            [*self._command, *arguments],
            cwd=ROOT,
            env=self._environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert done.returncode == 0, f"podman-compose {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def execute(self, service: str, *command: str, stdin: str | None = None) -> str:
        """Run a command in a container; return what it printed."""
        return self.run("exec", "-T", service, *command, stdin=stdin)

    def up(self) -> None:
        """Start everything, each service when those that it waits for are healthy."""
        for services in waves():
            self.start(*services)

    def start(self, *services: str) -> None:
        """Start services, and wait until they are healthy."""
        self.run("up", "--detach", "--no-build", *services, limit_s=COMMAND_S + HEALTHY_S)
        for service in services:
            self.wait_healthy(service)

    def wait_healthy(self, service: str) -> None:
        """Wait until a service's probe succeeds.

        Raises:
            AssertionError: it does not in time; with what the container printed.
        """
        container = self.container(service)
        try:
            until_blocking(
                lambda: attempt("healthcheck", "run", container).returncode == 0,
                f"{service} is healthy",
                limit_s=HEALTHY_S,
            )
        except AssertionError as err:
            logs = attempt("logs", "--tail", "40", container)
            raise AssertionError(f"{err}; it printed: {logs.stdout}{logs.stderr}") from err

    def container(self, service: str) -> str:
        """Return the id of a service's container."""
        (found,) = self._labelled("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.service={service}")
        return found

    def status(self, service: str) -> str:
        """Return the state of a service's container: ``running``, ``exited``, ..."""
        return podman("inspect", "--format", "{{.State.Status}}", self.container(service)).strip()

    def down(self) -> None:
        """Remove containers, volumes and networks: as the page has it, and by force what that leaves.

        podman-compose leaves a container that ends and is started again all the time.

        Raises:
            AssertionError: something is left all the same.
        """
        containers = left(self.name).get("container", [])
        mounts = [mount for one in containers for mount in inspected("container", one)["Mounts"]]
        volumes = {mount["Name"] for mount in mounts if mount["Type"] == "volume"}  # those without a label, too
        try:
            self.run("--profile", "setup", "down", "--volumes", "--timeout", "30", limit_s=2 * COMMAND_S)
        finally:
            remove(self.name)
        assert left(self.name) == {}
        assert volumes.isdisjoint(podman("volume", "ls", "--quiet").split())

    def _labelled(self, *arguments: str) -> list[str]:
        return podman(*arguments, "--filter", f"label={LABEL}={self.name}").split()


def left(project: str) -> dict[str, list[str]]:
    """Return the names of the containers, volumes and networks that there are of a project, by kind."""
    label = ("--filter", f"label={LABEL}={project}")
    found = {
        "container": podman("container", "ls", "--all", "--quiet", *label).split(),
        "volume": podman("volume", "ls", "--quiet", *label).split(),
        "network": podman("network", "ls", "--quiet", *label).split(),
    }
    return {kind: names for kind, names in found.items() if names}


def remove(project: str) -> None:
    """Remove by force what there is of a project."""
    for kind, names in left(project).items():
        # Containers know those that they wait for, which may then not go before them.
        podman(kind, "rm", "--force", *(("--depend", "--time", "0") if kind == "container" else ()), *names)


def remove_of_killed_runs() -> None:
    """Remove what runs have left that could not end by themselves. No other run may be under way."""
    lists = (("container", "ls", "--all"), ("volume", "ls"), ("network", "ls"))
    items = [item for words in lists for item in json.loads(podman(*words, "--format", "json") or "[]")]
    labels = [item.get("Labels") or item.get("labels") or {} for item in items]
    for name in {found[LABEL] for found in labels if LABEL in found}:
        if name.startswith(PREFIX):
            remove(name)


@contextmanager
def running(name: str, variables: Mapping[str, str]) -> Iterator[Project]:
    """Run a project: keys are made, everything is healthy; and nothing is left of it afterwards."""
    project = Project(name, variables)
    try:
        project.run("--profile", "setup", "run", "--rm", "keys")
        project.up()
        yield project
    finally:
        project.down()
