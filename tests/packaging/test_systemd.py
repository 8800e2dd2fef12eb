"""The systemd units: systemd takes them, they run what exists, and they leave a node the time to be drained."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from cli.main import load
from cli.stack.child import STOP_TIMEOUT_S
from cli.stack.children import STOP_ORDER
from services.agent.cluster.departure import SAVE_FACTOR
from services.agent.files.rank_users import NEEDED
from shared.bus.identities import SERVICES
from shared.errors import Archived, Corrupt, InvalidInput, NameInUse, NewerVersion
from shared.settings.model import Settings, read_settings
from tests import units
from tests.units import ROOT, UNITS, Unit

END_S = 10.0
"""Time in which an agent ends once it has left: ``STOP_TIMEOUT_S`` of the agent, and some more."""

PREFIX = "/opt/unicron/.venv/bin/"
"""Where the units expect the programs of the virtual environment."""

KNOWN = {
    "Unit": {"Description", "After", "Wants"},
    "Install": {"WantedBy"},
    "Service": {
        *("Type", "User", "DynamicUser", "Environment", "EnvironmentFile", "LoadCredential", "WorkingDirectory"),
        *("ExecStart", "ExecReload", "KillMode", "TimeoutStopSec", "Restart", "RestartSec", "RestartPreventExitStatus"),
        *("LimitMEMLOCK", "LimitNOFILE", "StateDirectory", "StateDirectoryMode", "RuntimeDirectory"),
        *("RuntimeDirectoryMode", "UMask", "CapabilityBoundingSet", "NoNewPrivileges", "ProtectSystem", "ProtectHome"),
        *("PrivateTmp", "PrivateDevices", "ProtectClock", "ProtectControlGroups", "ProtectHostname"),
        *("ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables", "RestrictAddressFamilies"),
        *("RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID", "LockPersonality"),
        *("MemoryDenyWriteExecute", "SystemCallArchitectures"),
        *("AmbientCapabilities", "DevicePolicy", "DeviceAllow"),
    },
}
"""Section -> directives, all of which systemd 247 knows (systemd.exec(5), systemd.service(5), systemd.kill(5))."""


def unit(name: str) -> Unit:
    return units.read(ROOT / "deploy" / "systemd" / f"unicron-{name}.service")


def needed_s() -> float:
    """How long an agent that is asked to end may take."""
    return SAVE_FACTOR * float(Settings.model_fields["drain_timeout_s"].default) + END_S


def complaints(path: Path, folder: Path) -> str:
    """Return what systemd says of a unit whose programs are there."""
    program = folder / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = folder / path.name
    lines = path.read_text().splitlines(keepends=True)
    # systemd asks for the program to exist, which is where an operator has installed it.
    copy.write_text("".join(f"ExecStart={program}\n" if line.startswith("ExecStart=") else line for line in lines))
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout + done.stderr if done.returncode or done.stderr else ""


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_takes_the_unit(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze is installed")
    assert complaints(path, tmp_path) == ""
    wrong = tmp_path / f"wrong-{path.name}"
    wrong.write_text(path.read_text().replace("NoNewPrivileges=yes", "NoNewPrivilege=yes"))
    assert "NoNewPrivilege" in complaints(wrong, tmp_path)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_every_directive_is_known(path: Path) -> None:
    found = units.read(path)
    unknown = [(section, name) for section, name in found.directives if name not in KNOWN.get(section, ())]
    assert unknown == []
    assert found.one("Restart") == "on-failure"
    assert found.one("NoNewPrivileges") == "yes"
    assert found.one("ProtectSystem") == "strict"


@pytest.mark.parametrize("line", ["KillMode process", "Kill-Mode=process", "KillMode=process "])
def test_a_line_that_is_no_directive_is_noticed(line: str) -> None:
    with pytest.raises(ValueError, match="no directive"):
        Unit("wrong").add(f"[Service]\n{line}\n")


@pytest.mark.parametrize("name", ["agent", "control"])
def test_the_unit_runs_a_verb_with_options_that_it_has(name: str) -> None:
    program, verb, *arguments = unit(name).one("ExecStart").split()
    assert program == f"{PREFIX}unicron"
    assert verb == name
    options = [option for parameter in load(verb).params for option in parameter.opts]
    assert {word for word in arguments if word.startswith("--")} <= set(options)
    assert unit(name).one("KillMode") == "mixed"  # SIGTERM is for the main process, which ends the others in order


@pytest.mark.parametrize("name", ["agent", "control"])
def test_the_environment_of_the_unit_is_allowed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {f"UNICRON_{field.upper()}" for field in Settings.model_fields}
    for assignment in unit(name).words("Environment"):
        variable, _, value = assignment.partition("=")
        assert variable in fields
        monkeypatch.setenv(variable, value)
    (state,) = unit(name).words("StateDirectory")
    assert read_settings().run_dir == Path("/var/lib", state)


@pytest.mark.parametrize(("name", "watcher", "rights"), [("watch", "$WATCH", []),
                                                         ("watch-machine", "machine", ["CAP_SYSLOG"])])  # fmt: skip
def test_a_watcher_has_a_token_and_at_most_the_kernels_log(name: str, watcher: str, rights: list[str]) -> None:
    found = unit(name)
    assert found.one("ExecStart") == f"{PREFIX}unicron watch {watcher}"
    assert found.one("EnvironmentFile") == "/etc/unicron/watch.env"
    assert found.one("DynamicUser") == "yes"
    assert found.words("CapabilityBoundingSet") == found.words("AmbientCapabilities") == rights
    assert found.all("DeviceAllow") == (["/dev/kmsg r"] if rights else [])
    assert found.one("ProtectKernelLogs") == found.one("PrivateDevices") == ("" if rights else "yes")


def test_nats_writes_where_the_unit_lets_it() -> None:
    found = unit("nats")
    command = found.one("ExecStart").split()
    assert command[0] == f"{PREFIX}nats-server"
    assert command[command.index("--pid") + 1] == f"/run/{found.one('RuntimeDirectory')}/nats.pid"
    page = (ROOT / "docs" / "deploy" / "machines.md").read_text()
    assert f'"/var/lib/{found.one("StateDirectory")}"' in page
    assert f"--pid-file /run/{found.one('RuntimeDirectory')}/nats.pid" in page


def test_the_services_get_their_credentials_and_no_others() -> None:
    loaded = dict(value.split(":") for value in unit("control").all("LoadCredential"))
    assert loaded == {f"{service}.json": f"/etc/unicron/keys/{service}.json" for service in SERVICES}
    assert unit("control").one("ExecStart").endswith("--keys ${CREDENTIALS_DIRECTORY}")


def test_the_agent_has_the_capabilities_that_it_needs_and_no_others() -> None:
    assert sorted(unit("agent").words("CapabilityBoundingSet")) == sorted(NEEDED.values())
    assert unit("control").words("CapabilityBoundingSet") == unit("nats").words("CapabilityBoundingSet") == []


def test_the_unit_leaves_time_for_a_drain() -> None:
    assert float(unit("agent").one("TimeoutStopSec")) >= needed_s()


def test_the_unit_leaves_time_for_the_services_to_end_in_order() -> None:
    assert float(unit("control").one("TimeoutStopSec")) > len(STOP_ORDER) * STOP_TIMEOUT_S


def test_the_containers_leave_time_for_a_drain() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name in ("agent-n0", "agent-n1"):
        assert float(services[name]["stop_grace_period"].removesuffix("s")) >= needed_s()


def test_what_a_restart_does_not_mend_is_not_restarted() -> None:
    agent = {int(code) for code in unit("agent").words("RestartPreventExitStatus")}
    assert agent == {InvalidInput.exit_code, NameInUse.exit_code}
    control = {int(code) for code in unit("control").words("RestartPreventExitStatus")}
    assert control == {kind.exit_code for kind in (InvalidInput, Archived, NewerVersion, Corrupt)}
