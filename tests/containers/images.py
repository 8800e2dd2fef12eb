"""The images: those that others make, or local stand-ins for them, and the two of this project.

Where no registry can be reached, the images of others are made of Debian's packages and the wheel of nats-server. Their
names say so (``localhost/unicron-stand-in/...``), so nobody takes them for the real ones.

All images stay in podman's store, where the next run finds their layers. ``podman image rm`` takes them away again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from shared.nats.nats_server import find_binary
from tests.containers.podman import attempt, has_image, inspected, podman

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = Path(__file__).parent / "stand_ins"

BASES = {"BASE_IMAGE": "python", "NATS_IMAGE": "nats", "POSTGRES_IMAGE": "postgres"}
"""Variable of docker-compose.yml -> the stand-in for its image."""

STAND_IN = "localhost/unicron-stand-in"
OURS = {"CONTROL_IMAGE": "localhost/unicron-test-control", "WORKER_IMAGE": "localhost/unicron-test-worker"}
"""Variable of docker-compose.yml -> name of the image that the tests build: not the one that a user has built."""

SOURCE = "UNICRON_CONTAINER_BASES"
"""Environment variable: ``registry`` or ``stand-in``; without it, stand-ins are used where the registry does not
answer."""

PULL_S = 300.0
"""For some 100 MB from a registry, and for the attempt to reach one."""

DEBIAN_S = 600.0
"""For debootstrap, which fetches and unpacks 100 MB: a minute or two."""

BUILD_S = 1800.0
"""For the worker image: torch is 200 MB to fetch on CPU, several GB with CUDA."""


def defaults() -> dict[str, str]:
    """Return the images of others, as docker-compose.yml names them by itself."""
    text = (ROOT / "docker-compose.yml").read_text()
    return {variable: _default(text, variable) for variable in BASES}


def _default(text: str, variable: str) -> str:
    (found,) = set(re.findall(rf"\$\{{{variable}:-([^}}]+)\}}", text))
    return str(found)


def bases() -> dict[str, str]:
    """Get the images of others, or make the stand-ins for them; return variable -> image."""
    source = os.environ.get(SOURCE, "")
    wanted = {variable: f"docker.io/library/{name}" for variable, name in defaults().items()}
    if source != "stand-in" and all(_pulled(name) for name in wanted.values()):
        return wanted
    assert source != "registry", f"{SOURCE}=registry, but not all of {sorted(wanted.values())} can be had"
    return stand_ins()


def _pulled(name: str) -> bool:
    return has_image(name) or attempt("pull", "--quiet", name, limit_s=PULL_S).returncode == 0


def stand_ins() -> dict[str, str]:
    """Make what is missing of the stand-ins; return variable -> image."""
    if not has_image(f"{STAND_IN}/debian:bookworm"):
        _make_debian()
    with tempfile.TemporaryDirectory(prefix="unicron-stand-in-") as folder:
        context = Path(folder)
        shutil.copytree(STAND_INS, context, dirs_exist_ok=True)
        shutil.copy(find_binary(), context / "nats-server")
        return {variable: _make_stand_in(name, context) for variable, name in BASES.items()}


def _make_stand_in(name: str, context: Path) -> str:
    image = f"{STAND_IN}/{name}"
    podman(
        *("build", "--network", "host", "--tag", image, "--file", context / f"{name}.Containerfile", context),
        limit_s=BUILD_S,
    )
    return f"{image}:latest"


def _make_debian() -> None:
    """Make a Debian of its least packages."""
    assert shutil.which("debootstrap"), "no registry answers, and there is no debootstrap (Debian: apt-get install it)"
    with tempfile.TemporaryDirectory(prefix="unicron-debian-") as folder:
        root, archive = Path(folder, "root"), Path(folder, "root.tar")
        command = ["debootstrap", "--variant=minbase", "bookworm", str(root)]
        subprocess.run(command, check=True, timeout=DEBIAN_S, stdout=subprocess.DEVNULL)
        shutil.rmtree(root / "var" / "cache" / "apt" / "archives")
        subprocess.run(["tar", "--create", "--file", archive, "--directory", root, "."], check=True, timeout=DEBIAN_S)
        podman("import", "--quiet", archive, f"{STAND_IN}/debian:bookworm", limit_s=DEBIAN_S)


def build(base: str) -> None:
    """Build both images of this project on a base image, where pip finds packages as it does on this machine."""
    with pip_volumes() as volumes:
        for variable, name in OURS.items():
            target = variable.removesuffix("_IMAGE").lower()
            podman(
                *("build", "--network", "host", *volumes, "--build-arg", f"BASE_IMAGE={base}"),
                *("--target", target, "--tag", name, ROOT),
                limit_s=BUILD_S,
            )


@contextmanager
def pip_volumes() -> Iterator[list[str]]:
    """Give the arguments that show this machine's settings of pip to a build, with the files that these name.

    Nothing of them stays in an image.
    """
    settings = pip_settings()
    with tempfile.TemporaryDirectory(prefix="unicron-pip-") as folder:
        file = Path(folder, "pip.conf")
        file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
        shown = {str(file): "/etc/pip.conf"} | {path: path for path in _named_paths(settings)}
        yield [word for source, target in shown.items() for word in ("--volume", f"{source}:{target}:ro")]


def pip_settings() -> dict[str, str]:
    """Return what pip's configuration and environment say here about where packages come from."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", text, re.MULTILINE)
    origins = ("index-url", "extra-index-url", "find-links", "cert", "trusted-host", "proxy", "default-timeout")
    return {name: value for name, value in found if name in origins}


def _named_paths(settings: Mapping[str, str]) -> Iterator[str]:
    for value in settings.values():
        for word in value.split():
            if word.startswith("file://"):
                # An index's links lead to beside its folder.
                yield str(Path(unquote(urlsplit(word).path)).parent)
            elif word.startswith("/"):
                yield word


def size_bytes(image: str) -> int:
    """Return how much an image has, with all its layers."""
    return int(inspected("image", image)["Size"])
