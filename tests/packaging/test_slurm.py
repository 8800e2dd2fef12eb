"""deploy/slurm/unicron.sbatch, as far as it can be checked without Slurm (tests/slurm runs it)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.stack.children import SERVICES
from services.agent.cluster.departure import SAVE_FACTOR
from shared.settings.model import Settings

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "unicron.sbatch"
TEXT = SCRIPT.read_text()

END_S = 30.0
"""Time in which the agents, the control plane and the script end after a drain."""


@pytest.mark.parametrize("command", [("bash", "-n"), (str(Path(sys.executable).parent / "shellcheck"), "--norc")])
def test_the_script_has_no_errors(command: tuple[str, ...]) -> None:
    result = subprocess.run([*command, str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_every_variable_is_a_setting() -> None:
    found = {name.removeprefix("UNICRON_").lower() for name in re.findall(r"\bUNICRON_[A-Z_]+\b", TEXT)}
    assert found
    assert found <= Settings.model_fields.keys()


def test_the_control_plane_is_complete() -> None:
    (begun,) = re.findall(r"for name in (nats .*); do", TEXT)
    (ended,) = re.findall(r"for name in (transition .*); do", TEXT)
    assert set(begun.split()) == set(ended.split()) == {"nats", *SERVICES}
    assert SERVICES == {name: f"services.{name}.main" for name in SERVICES}


def test_nats_has_the_shipped_limits() -> None:
    shipped = (ROOT / "deploy" / "nats" / "nats.conf").read_text()
    for name in ("max_payload", "sync_interval", "max_memory_store", "max_file_store"):
        ours, theirs = (re.findall(rf"\b{name}: (\w+)", text) for text in (TEXT, shipped))
        assert ours == theirs
        assert len(ours) == 1


def test_the_signal_before_the_time_limit_leaves_time_for_a_drain() -> None:
    (warning_s,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", TEXT, re.MULTILINE)
    drain_s = SAVE_FACTOR * float(Settings.model_fields["drain_timeout_s"].default)
    assert float(warning_s) >= drain_s + END_S


@pytest.mark.parametrize(
    ("host", "node"), [("n0", "n0"), ("GPU_07", "gpu-07"), ("node-1.cluster.example.org", "node-1")]
)
def test_a_host_name_becomes_the_name_of_a_node(host: str, node: str) -> None:
    (function,) = re.findall(r"^node_name\(\) \{.*?^\}", TEXT, re.MULTILINE | re.DOTALL)
    bash = shutil.which("bash")
    assert bash is not None
    result = subprocess.run(
        [bash, "-c", f'{function}\nnode_name "$1"', "bash", host], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"{node}\n"
