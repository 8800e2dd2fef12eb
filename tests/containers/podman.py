"""podman, and what it needs of the machine."""

from __future__ import annotations

import atexit
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

REQUIRE = "UNICRON_REQUIRE_CONTAINERS"
"""Environment variable: with the value 1, a machine on which no container can run is a failure."""

COMMAND_S = 120.0
"""For a command that builds and pulls nothing: a second or two, on a busy machine far more."""

HYBRID_CGROUPS = Path("/sys/fs/cgroup/unified/cgroup.controllers")
"""Where cgroups of version 2 are beside those of version 1."""

CAP_SYS_RESOURCE = 24
"""From linux/capability.h."""

MOST_PROCESSES = 32_768
"""Of a container's user, where podman may not set its own limit of a million."""


def configuration() -> str:
    """Return what podman needs to be told on this machine (containers.conf(5)): nothing on most."""
    lines = []
    if HYBRID_CGROUPS.exists() and HYBRID_CGROUPS.read_text().strip():
        lines += ["[engine]", 'runtime = "runc"']  # crun refuses such machines
    status = Path("/proc/self/status").read_text()
    (rights,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    if not rights >> CAP_SYS_RESOURCE & 1:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        limits = [f"nofile={files}:{files}", f"nproc={MOST_PROCESSES}:{MOST_PROCESSES}"]
        lines += ["[containers]", f"default_ulimits = {json.dumps(limits)}"]
    return "".join(f"{line}\n" for line in lines)


@cache
def environment() -> dict[str, str]:
    """Return the environment of podman, and of podman-compose which calls it."""
    # Otherwise podman has systemd run the probes, which not every machine has; compose.py runs them.
    found = {**os.environ, "DISABLE_HC_SYSTEMD": "true"}
    if text := configuration():
        folder = Path(tempfile.mkdtemp(prefix="unicron-podman-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (folder / "containers.conf").write_text(text)
        found["CONTAINERS_CONF"] = str(folder / "containers.conf")
    return found


def find_compose() -> Path | None:
    """Return podman-compose: the one beside the interpreter, else that on PATH."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which("podman-compose", path=path)
    return None if found is None else Path(found)


def missing() -> str:
    """Return what the machine lacks; empty if containers can run."""
    if os.geteuid() != 0:
        return "root is needed: rootless podman has no rights to the user ids of tasks"
    if shutil.which("podman") is None:
        return "there is no podman (Debian: apt-get install podman)"
    if shutil.which("iptables") is None:
        # podman's own network program says no more than "No such file or directory" without it.
        return "there is no iptables (Debian: apt-get install iptables)"
    if find_compose() is None:
        return "there is no podman-compose (pip install 'podman-compose>=1.6')"
    if 'runtime = "runc"' in configuration() and shutil.which("runc") is None:
        return "there is no runc, which cgroups of versions 1 and 2 at once need (Debian: apt-get install runc)"
    info = attempt("info")
    return "" if info.returncode == 0 else f"podman info: {info.stderr.strip()[-500:]}"


def podman(*arguments: str | Path, limit_s: float = COMMAND_S, stdin: str | None = None) -> str:
    """Run podman; return what it printed.

    Raises:
        AssertionError: it failed; with what it said.
    """
    done = attempt(*arguments, limit_s=limit_s, stdin=stdin)
    assert done.returncode == 0, f"podman {' '.join(map(str, arguments))}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def attempt(
    *arguments: str | Path, limit_s: float = COMMAND_S, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run podman, which may fail."""
    return subprocess.run(
        ["podman", *map(str, arguments)],
        input=stdin,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def inspected(kind: str, name: str) -> dict[str, Any]:
    """Return what podman knows of a container, an image or a network."""
    (found,) = json.loads(podman(kind, "inspect", name))
    assert isinstance(found, dict)
    return found


def has_image(name: str) -> bool:
    """Return whether an image is here."""
    return attempt("image", "exists", name).returncode == 0
