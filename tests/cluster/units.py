"""What systemd does with the units of deploy/systemd, as far as they need it, on a machine of the bed.

systemd itself is not run: it would start the host's other units as well, and these change files of the host. This
starts the program of a unit with its environment, user, capabilities and folders, and ends it as the unit says.

The folders that an operator writes to are the machine's own: `/etc` is a copy of the host's, `/var/lib` and `/opt` are
empty but for the checkout in `/opt/unicron`, and `/srv/unicron` is a folder that all machines share. All else of the
host's disk is read-only, as it is for units with `ProtectSystem=strict`.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests import units
from tests.agent import readable
from tests.cluster.machine import Machine, MachineFailed, Process
from tests.cluster.network import ROOT
from tests.condition import until_blocking
from tests.units import END_SIGNAL, Unit

CHECKOUT = "/opt/unicron"
SHARED = "/srv/unicron"
"""Where docs/deploy/machines.md has the checkout, and what all nodes see."""

BOOT_S = 30.0
"""For the mounts, which take a fraction of a second."""

START_S = 60.0
"""For a process to end or to begin, on a busy machine."""

DYNAMIC_USER = "64002"
"""A user of systemd's own making (DynamicUser): an id below 65536, which no account of the host has."""

BOOT = r"""
set -eu
mkdir -p /run/opt/unicron /run/srv/unicron /run/etc /run/var-lib /run/tmp
chmod 1777 /run/tmp
cp -a /etc/. /run/etc
rm -rf /run/etc/unicron
mkdir -p /run/etc/systemd/system
for one in "$ROOT"/*; do ln -s "$one" /run/opt/unicron; done
ln -sfn "$EXAMPLES" /run/opt/unicron/examples
ln -sfn "$PREFIX" /run/opt/unicron/.venv
mount --bind "$COMMON" /run/srv/unicron
mount --bind /run/etc /etc
mount --bind /run/opt /opt
mount --rbind /run/srv /srv
mount --bind /run/var-lib /var/lib
mount -o remount,bind,ro /
[ ! -w / ]
id -u postgres > /dev/null 2>&1 || useradd --system postgres
touch /run/booted
exec sleep infinity
"""
"""Shell, in a mount namespace of its own. `/run` is the machine's own disk, a tmpfs."""


@dataclass
class Service:
    """A unit that runs: its main process, and the identifier that all its processes have in their environment."""

    unit: Unit
    main: Process
    invocation: str


class UnitMachine:
    """A machine on which an operator works, and units run.

    Args:
        machine: which is on.
        common: folder that all machines see as ``SHARED``.
        examples: in place of the checkout's.
        environment: further variables of all services and commands.
    """

    def __init__(self, machine: Machine, common: Path, examples: Path, environment: Mapping[str, str]) -> None:
        self.machine = machine
        self._variables = {
            "PATH": os.environ["PATH"],
            "HOME": "/root",
            "TMPDIR": "/run/tmp",
            "PYTHONPATH": str(ROOT),  # the virtual environment may have another checkout
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            **environment,
        }
        self._services: dict[str, Service] = {}
        self._commands = 0
        boot = {"ROOT": str(ROOT), "PREFIX": sys.prefix, "EXAMPLES": str(examples), "COMMON": str(common)}
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-P", readable.__file__]
        self._first = machine.start(
            [*command, "bash", "-c", BOOT], output="boot.log", environment=self._variables | boot
        )
        booted = machine.path("/run/booted")

        def has_booted() -> bool:
            if machine.exit_code(self._first) is not None:
                raise MachineFailed(f"{machine.name} has ended before it has its folders")
            return booted.exists()

        until_blocking(has_booted, f"{machine.name} has its folders", limit_s=BOOT_S)

    def path(self, inside: str) -> Path:
        """Return where the test finds a file of the machine."""
        return self.machine.path(f"/proc/{self._first.pid}/root") / inside.lstrip("/")

    def run(self, command: str, limit_s: float = 180.0) -> str:
        """Run a line of shell in the checkout as root; return what it printed. Exported variables stay.

        Raises:
            MachineFailed: it failed.
        """
        words = shlex.split(command)
        if words[0] == "systemctl":
            return self._systemctl(words[1], words[2:])
        self._commands += 1
        kept = "/run/exported"
        script = f"[ ! -e {kept} ] || . {kept}; cd {CHECKOUT}\n{command}\ncode=$?; export -p > {kept}; exit $code"
        return self.machine.run(
            [*self._inside(self._variables), "bash", "-c", script],
            output=f"command-{self._commands}.log",
            limit_s=limit_s,
        )

    def wait_for_line(self, name: str, line: str) -> None:
        """Wait until a unit has printed a line."""
        self.machine.wait_for_line(self._services[name].main, line, START_S)

    def status(self, name: str) -> int | None:
        """Return the exit status with which a unit's main process has ended; None while it runs."""
        return self.machine.exit_code(self._services[name].main)

    def processes(self, name: str) -> list[int]:
        """Return the pids, on the machine, of a unit's processes: those that have its identifier."""
        mark = f"INVOCATION_ID={self._services[name].invocation}".encode()
        found = []
        for folder in self.machine.path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
                except OSError:
                    continue  # it has ended
        return found

    # ---- systemctl

    def _systemctl(self, verb: str, words: list[str]) -> str:
        names = [word for word in words if not word.startswith("-")]
        options = [word for word in words if word.startswith("-")]
        if verb == "daemon-reload":
            return ""
        for name in names:
            if verb in ("start", "enable"):
                self._start(name)
            elif verb in ("stop", "disable"):
                self._stop(name)
            else:
                assert (verb, options) == ("kill", ["--signal=SIGKILL"]), (verb, options)
                self._kill(name)
                self._start_again(name)
        return ""

    def _start(self, name: str) -> None:
        unit = units.read(self.path(f"/etc/systemd/system/{name}.service"))
        environment = self._environment(unit)
        user = unit.one("User") or (DYNAMIC_USER if unit.one("DynamicUser") == "yes" else "")
        self._make_folders(unit, user)
        environment |= self._load_credentials(unit, user)
        command = [_expanded(word, environment) for word in unit.one("ExecStart").split()]
        invocation = environment["INVOCATION_ID"] = uuid.uuid4().hex
        rights = ["setpriv", "--no-new-privs", f"--bounding-set={_capabilities(unit)}", "--inh-caps=-all"]
        if user:
            rights += [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        folder = unit.one("WorkingDirectory", "/")
        self._services[name] = Service(
            unit,
            self.machine.start(
                [*self._inside(environment, folder), *rights, *command], output=f"{name}.log", environment={}
            ),
            invocation,
        )

    def _stop(self, name: str) -> None:
        """End a unit as it says: the signal, to whom, how long, and what then."""
        service = self._services[name]
        mode = service.unit.one("KillMode", "control-group")
        number = signal.Signals[service.unit.one("KillSignal", END_SIGNAL)]
        addressed = self.processes(name) if mode == "control-group" else [service.main.pid]
        for pid in addressed:
            self.machine.signal(pid, number)
        # MachineFailed where systemd would kill the unit.
        self.machine.wait(service.main, float(service.unit.one("TimeoutStopSec")))
        if mode != "process":
            self._kill(name)

    def _kill(self, name: str) -> None:
        """Kill all that is left of a unit."""
        service = self._services[name]
        for pid in self.processes(name):
            self.machine.kill(pid)
        self.machine.wait(service.main, START_S)
        until_blocking(lambda: not self.processes(name), f"no process of {name} is left", limit_s=START_S)

    def _start_again(self, name: str) -> None:
        """Start a unit again that has ended by itself, if it says so."""
        unit, code = self._services[name].unit, self.status(name)
        assert unit.one("Restart") == "on-failure"
        if code and str(code) not in unit.words("RestartPreventExitStatus"):
            self._start(name)

    # ---- what a unit says

    def _inside(self, environment: Mapping[str, str], folder: str = "/") -> list[str]:
        """Return the beginning of a command line that runs where the operator works, as one process."""
        enter = ["nsenter", f"--target={self._first.pid}", "--mount"]
        return [*enter, "env", "-i", f"--chdir={folder}", *(f"{name}={value}" for name, value in environment.items())]

    def _environment(self, unit: Unit) -> dict[str, str]:
        found = dict(self._variables)
        assignments = unit.words("Environment")
        for name in unit.all("EnvironmentFile"):
            file = self.path(name.removeprefix("-"))
            if file.exists() or not name.startswith("-"):
                assignments += [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
        return found | dict(assignment.split("=", 1) for assignment in assignments)

    def _make_folders(self, unit: Unit, user: str) -> None:
        for directive, parent in (("StateDirectory", "/var/lib"), ("RuntimeDirectory", "/run")):
            for folder in unit.words(directive):
                self._install(f"{parent}/{folder}", user, unit.one(f"{directive}Mode", "0755"), directory=True)

    def _load_credentials(self, unit: Unit, user: str) -> dict[str, str]:
        credentials = f"/run/credentials/{unit.name}"
        loaded = [value.split(":") for value in unit.all("LoadCredential")]
        if not loaded:
            return {}
        self._install(credentials, user, "0500", directory=True)
        for name, source in loaded:
            self._install(f"{credentials}/{name}", user, "0400", source=source)
        return {"CREDENTIALS_DIRECTORY": credentials}

    def _install(self, path: str, user: str, mode: str, *, directory: bool = False, source: str = "") -> None:
        owner = user or "root"
        what = ["-d", path] if directory else ["-D", source, path]
        command = ["install", f"--owner={owner}", f"--group={owner}", f"--mode={mode}", *what]
        self.machine.run([*self._inside(self._variables), *command], output="install.log")


def _expanded(word: str, environment: Mapping[str, str]) -> str:
    for name, value in environment.items():
        word = word.replace(f"${{{name}}}", value)
    assert "$" not in word, word
    return word


def _capabilities(unit: Unit) -> str:
    """Return the capabilities that a unit's processes can have, as setpriv takes them."""
    kept = [f"+{name.removeprefix('CAP_').lower()}" for name in unit.words("CapabilityBoundingSet")]
    return ",".join(["-all", *kept])
