"""The systemd unit of the agent: it runs what exists, and leaves a node the time to be drained."""

from __future__ import annotations

import configparser
import importlib.util
from pathlib import Path

import yaml

from services.agent.departure import SAVE_FACTOR
from shared.errors import InvalidInput, NameInUse
from shared.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
END_S = 10.0
"""Time in which an agent ends once it has left: ``STOP_TIMEOUT_S`` of the agent, and some more."""


def needed_s() -> float:
    """How long an agent that is asked to end may take."""
    return SAVE_FACTOR * float(Settings.model_fields["drain_timeout_s"].default) + END_S


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(ROOT / "deploy" / "systemd" / "unicron-agent.service")
    return parser["Service"]


def test_the_unit_runs_the_supervisor_and_signals_it_alone() -> None:
    module = unit()["ExecStart"].split()[-1]
    assert importlib.util.find_spec(module) is not None
    assert unit()["KillMode"] == "process"


def test_the_unit_leaves_time_for_a_drain() -> None:
    assert float(unit()["TimeoutStopSec"]) >= needed_s()


def test_the_containers_leave_time_for_a_drain() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name in ("agent-n0", "agent-n1"):
        assert float(services[name]["stop_grace_period"].removesuffix("s")) >= needed_s()


def test_what_a_restart_does_not_mend_is_not_restarted() -> None:
    codes = {int(code) for code in unit()["RestartPreventExitStatus"].split()}
    assert codes == {InvalidInput.exit_code, NameInUse.exit_code}
